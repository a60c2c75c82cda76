"""Tiny models with random weights: a BERT encoder, a Llama decoder without pad token, a static embedding."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = "the a of on in cat dog mat sat sea fish river bank money tree green old small house how what is why".split()
TEXTS = [
    "the cat sat on the mat",
    "",
    "fish in the sea, fish in the river",
    "what is a bank?",
    "the old green house " * 12,
    "   ",
    "dog",
    "why is the sea green and the tree old " * 3,
]


def word_tokenizer(*, special: bool) -> Tokenizer:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ",", "?", "and", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return tokenizer


@pytest.fixture(scope="session")
def texts():
    return list(TEXTS)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(path)
    PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(special=True), unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=48,
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128, pad_token_id=None, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    # No pad token, as most decoders come.
    PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(special=False), unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]",
        model_max_length=64,
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(scope="session")
def static_folder(tmp_path_factory):
    """The form of the embedded model: int8 vectors with a float16 scale a row."""
    path = tmp_path_factory.mktemp("models") / "static"
    path.mkdir()
    random = np.random.default_rng(0)
    tokenizer = word_tokenizer(special=False)
    rows = tokenizer.get_vocab_size()
    tokenizer.save(str(path / "tokenizer.json"))
    embedding = random.integers(-127, 128, (rows, 16)).astype(np.int8)
    scale = random.uniform(0.01, 0.02, rows).astype(np.float16)
    save_file({"embedding": embedding, "scale": scale}, path / "model.safetensors")
    (path / "shortlist.json").write_text(json.dumps({"format_version": 1, "kind": "static"}))
    return path
