"""Word-wise tokenisation: each distinct word goes through the tokenizer once, a text is a look-up of its words.

A tokenizer that splits at blanks before anything else gives a text the tokens of its blank-separated words, end
to end. Natural text repeats its words, so that looking them up is several times faster than tokenising again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shortlist.retrieval.tokens import Tokens, concatenate, ranges

# Words kept, about 25 MB. A bound on vocabulary, not on texts: when it is reached the table starts anew.
MAX_WORDS = 131_072
# Lists of words, and the tokenizer's encodings, take far more memory than ids: how many texts have them at once.
_SLICE = 512

# The parts that treat every character, or every blank-separated word, by itself.
_NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFD", "NFC"}
_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}


class WordTokenizer:
    """The ids that `tokenizer` gives without special tokens, the same ones, sooner; safe to call from threads."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        parts = json.loads(tokenizer.to_str())
        self.by_word = splits_at_blanks(parts)
        # "end." and "end," are then no words of their own.
        self.marks = _isolated_marks(parts) if self.by_word else ""
        self._lock = threading.Lock()
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["tokenizer"])  # type: ignore[misc]

    def _clear(self) -> None:
        self._words = _Numbers()
        self._ids: NDArray[np.int64] = np.zeros(0, np.int64)
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Token ids of `texts`."""
        look_up = self._look_up if self.by_word else self._plain
        return concatenate([look_up(texts[start : start + _SLICE]) for start in range(0, len(texts), _SLICE)])

    def _look_up(self, texts: Sequence[str]) -> Tokens:
        with self._lock:
            words = [self._split(text) for text in texts]
            counts = np.fromiter(map(len, words), np.int64, len(words))
            flat = list(chain.from_iterable(words))
            numbers = np.fromiter(map(self._words.__getitem__, flat), np.int64, len(flat))
            try:
                self._learn()
            except BaseException:
                self._clear()  # words with a number but no ids would shift those of every later text
                raise
            lengths = self._lengths[numbers]
            ids = self._ids[ranges(self._starts[numbers], lengths)]
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
            per_text = np.diff(ends[bounds])
            if len(self._words) > MAX_WORDS:
                self._clear()
        return Tokens(ids, per_text, per_text)

    def _split(self, text: str) -> list[str]:
        for mark in self.marks:
            text = text.replace(mark, f" {mark} ")
        return text.split(" ")

    def _learn(self) -> None:
        """Tokenise the words that were met for the first time."""
        new = self._words.new
        if not new:
            return
        tokens = concatenate([self._plain(new[start : start + _SLICE]) for start in range(0, len(new), _SLICE)])
        self._starts = np.concatenate([self._starts, tokens.starts + len(self._ids)])
        self._ids = np.concatenate([self._ids, tokens.ids])
        self._lengths = np.concatenate([self._lengths, tokens.lengths])
        new.clear()

    def _plain(self, texts: Sequence[str]) -> Tokens:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return Tokens.from_lists([encoding.ids for encoding in encodings])


class _Numbers(dict[str, int]):
    """Word → number, counting up; `new` lists those met since it was last cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


def splits_at_blanks(parts: dict[str, Any]) -> bool:
    """Whether a tokenizer (its JSON form) gives "a b" always the tokens of "a" and then those of "b"."""
    if parts["truncation"] or parts["padding"]:
        return False
    if any(_looks_around(token) for token in parts["added_tokens"]):
        return False
    normalizers, splitters = _steps(parts["normalizer"], "normalizers"), _steps(parts["pre_tokenizer"], "pretokenizers")
    return set(normalizers) <= _NORMALIZERS and bool(splitters) and splitters[0] in _SPLITTERS


def _isolated_marks(parts: dict[str, Any]) -> str:
    """The frequent marks that a tokenizer (its JSON form) makes tokens of their own wherever they stand."""
    if _steps(parts["pre_tokenizer"], "pretokenizers")[0] != "BertPreTokenizer":
        return ""
    special = "".join(token["content"] for token in parts["added_tokens"])
    return "".join(mark for mark in ".,()-:;/" if mark not in special)


def _looks_around(token: dict[str, Any]) -> bool:
    return token["lstrip"] or token["rstrip"] or token["single_word"] or " " in token["content"]


def _steps(part: dict[str, Any] | None, inner: str) -> list[str]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step["type"] for step in part[inner]]
    return [part["type"]]
