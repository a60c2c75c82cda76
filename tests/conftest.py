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


@pytest.fixture(scope="session")
def toy_folder() -> Path:
    return TOY


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


@pytest.fixture(scope="session")
def tiny_static(tmp_path_factory) -> Path:
    """Folder of a static encoder over the toy collection's words: 16 numbers a token, random, in under a second."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    from shortlist.retrieval.dual_encoder import DualEncoder
    from shortlist.retrieval.static import StaticTower

    words = _toy_words()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    embedding = torch.randn(len(words), 16, generator=torch.Generator().manual_seed(0))
    return DualEncoder(StaticTower(tokenizer, embedding)).save_pretrained(tmp_path_factory.mktemp("static") / "model")


@pytest.fixture(scope="session")
def tiny_transformer(tmp_path_factory) -> Path:
    """Folder of a plain Hugging Face BERT over the toy words: two layers of 32, with dropout, random."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert") / "model"
    folder.mkdir()
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *_toy_words()]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray cluster of this machine with at least four logical CPUs; commands find themselves connected and use it."""
    import torch

    from shortlist.retrieval.cluster import connect

    # Small products differ in their last bit between one thread, as the workers have here, and two.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with connect(cpus=4) as cluster:
        yield cluster.ray
    torch.set_num_threads(threads)


def _toy_words() -> list[str]:
    import json
    import re

    words: dict[str, None] = {}
    for name in ("corpus.jsonl", "queries.jsonl"):
        for line in (TOY / "beir" / name).read_text(encoding="utf-8-sig").split("\n"):
            if line.strip():
                record = json.loads(line)
                text = f"{record.get('title') or ''} {record['text']}".lower()
                words |= dict.fromkeys(re.findall(r"\w+|[^\w\s]+", text))
    return ["[UNK]", *sorted(set(words))]
