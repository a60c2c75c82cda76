"""A tiny dual encoder on disk, for commands that take a model."""

import re

import numpy as np
import pytest


def save_static_model(folder, texts, *, seed=0, dim=32):
    """Random token vectors over the words of `texts`: equal words, near texts."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    from shortlist.retrieval.dual_encoder import DualEncoder
    from shortlist.retrieval.static import StaticTower

    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text.lower())})
    vocabulary = {"[UNK]": 0, **{word: number for number, word in enumerate(words, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vectors = np.random.default_rng(seed).standard_normal((len(vocabulary), dim)).astype(np.float32)
    tower = StaticTower(tokenizer, torch.from_numpy(vectors))
    DualEncoder(tower, dtype="float32").eval().save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path, toy):
    return save_static_model(tmp_path / "model", toy.corpus.texts())


@pytest.fixture
def other_model(tmp_path, toy):
    return save_static_model(tmp_path / "other-model", toy.corpus.texts(), seed=1)


@pytest.fixture
def xc_model(tmp_path, toy_xc):
    """A model over the words of the toy labels and titles."""
    from shortlist import load_collection

    collection = load_collection(toy_xc)
    texts = [*collection.corpus.texts(), *collection.all_queries().values()]
    return save_static_model(tmp_path / "xc-model", texts, dim=24)
