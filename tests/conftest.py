"""Fixtures shared by all tests: the toy collections and an offline, quiet environment."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SHORTLIST_QUIET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOY = Path(__file__).parent / "toy"


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory):
    """Every test session has its own Arrow cache."""
    path = tmp_path_factory.mktemp("cache")
    os.environ["SHORTLIST_CACHE"] = str(path)
    return path


@pytest.fixture
def toy_beir() -> Path:
    return TOY / "beir"


@pytest.fixture
def toy_xc() -> Path:
    return TOY / "xc"


@pytest.fixture
def toy(toy_beir):
    from shortlist import load_collection

    return load_collection(toy_beir)
