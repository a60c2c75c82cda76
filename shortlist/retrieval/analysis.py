"""From text to terms: lower case, words, stop words out, stems; chosen by one name of a language.

A word is a run of two or more letters, digits or underscores. Chinese and Japanese are written without spaces, so a run
of their characters is cut into overlapping pairs, whatever the language is set to: no dictionary is needed, and a text
of several languages works. Thai, Lao, Khmer and Burmese have no spaces either and are not cut: put spaces between their
words before indexing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import bm25s
import Stemmer

from shortlist.errors import ConfigError

BY_LANGUAGE = "auto"  # stemmer and stop words of the language


@dataclass(frozen=True)
class Language:
    """What is there for a language: the code of its stop words in bm25s and its Snowball stemmer, None for neither."""

    name: str
    stopwords: str | None
    stemmer: str | None


# ISO 639-1 code → language. bm25s has stop words of some, Snowball stems of more.
_CODES = {
    "ar": "arabic", "hy": "armenian", "eu": "basque", "ca": "catalan", "cs": "czech", "da": "danish", "nl": "dutch",
    "en": "english", "eo": "esperanto", "et": "estonian", "fi": "finnish", "fr": "french", "de": "german",
    "el": "greek", "hi": "hindi", "hu": "hungarian", "id": "indonesian", "ga": "irish", "it": "italian",
    "lt": "lithuanian", "ne": "nepali", "no": "norwegian", "fa": "persian", "pl": "polish", "pt": "portuguese",
    "ro": "romanian", "ru": "russian", "sr": "serbian", "st": "sesotho", "es": "spanish", "sv": "swedish",
    "ta": "tamil", "tr": "turkish", "yi": "yiddish", "zh": "chinese", "ja": "japanese", "ko": "korean",
}  # fmt: skip
_STOPWORDS = ("da", "de", "en", "en_plus", "es", "fr", "it", "ko", "nl", "no", "pt", "ru", "sv", "tr", "zh")
_UNCUT = {"th": "thai", "lo": "lao", "km": "khmer", "my": "burmese"}

_WORD = re.compile(r"\b\w\w+\b")
_UNSPACED = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
# A run without spaces, or a word as above.
_PIECE = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}][^\W{_UNSPACED}]+")


def language_of(name: str) -> Language:
    """The language of a name ("german") or an ISO 639-1 code ("de"); ConfigError lists what there is."""
    given = str(name).strip().lower()
    code = given if given in _CODES else next((code for code, full in _CODES.items() if full == given), None)
    if given in _UNCUT or given in _UNCUT.values():
        raise ConfigError(
            f"language {name!r} is written without spaces and its words cannot be found here; put spaces between them "
            "and choose no language (--language none, in Python language=None)."
        )
    if code is None:
        raise ConfigError(
            f"language is {name!r}; expected none or one of {', '.join(sorted(_CODES.values()))} (or its code: de)."
        )
    full = _CODES[code]
    return Language(full, code if code in _STOPWORDS else None, full if full in Stemmer.algorithms() else None)


class Analyzer:
    """Text → terms, the same for documents and queries.

    Args:
        language: sets stemmer and stop words: a name ("german") or code ("de"); None for neither. Some languages have
            one of the two only.
        stemmer: a Snowball algorithm (`english`, `german`, …) or None; "auto": of the language.
        stopwords: a list of words, a language that bm25s has a list for (`en`, `de`, …), or None; "auto": of the
            language.

    Raises:
        ConfigError: an unknown language, stemmer or stop word list.
    """

    def __init__(
        self,
        *,
        language: str | None = "english",
        stemmer: str | None = BY_LANGUAGE,
        stopwords: str | Sequence[str] | None = BY_LANGUAGE,
    ):
        known = Language("none", None, None) if language is None else language_of(language)
        self.language = None if language is None else known.name
        self.stemmer = known.stemmer if stemmer == BY_LANGUAGE else stemmer
        self.stopwords: str | list[str] | None = (
            known.stopwords
            if isinstance(stopwords, str) and stopwords == BY_LANGUAGE
            else stopwords
            if stopwords is None or isinstance(stopwords, str)
            else list(stopwords)
        )
        if self.stemmer is not None and self.stemmer not in Stemmer.algorithms():
            raise ConfigError(
                f"stemmer is {self.stemmer!r}; expected none or one of {', '.join(sorted(Stemmer.algorithms()))}."
            )
        self._stem = str if self.stemmer is None else Stemmer.Stemmer(self.stemmer).stemWord
        try:
            words = bm25s.tokenization.Tokenizer(stopwords=self.stopwords).stopwords  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError(
                f"stopwords is {self.stopwords!r}; expected none, a list of words or one of {', '.join(_STOPWORDS)}."
            ) from None
        if not all(isinstance(word, str) for word in words):
            raise ConfigError("the list of stop words holds something that is not a string; expected words.")
        self._stopwords = frozenset(word.lower() for word in words)

    def __call__(self, text: str) -> list[str]:
        """The terms of `text` in order, repeated ones included."""
        return [term for term in map(self.term, self.words(text)) if term is not None]

    def words(self, text: str) -> list[str]:
        """The lower-case words of `text`, stop words included; pairs of characters where there are no spaces."""
        lower = text.lower()
        if lower.isascii() or not _HAS_UNSPACED.search(lower):
            return _WORD.findall(lower)
        words: list[str] = []
        for piece in _PIECE.findall(lower):
            if _HAS_UNSPACED.match(piece) and len(piece) > 2:
                words += [piece[start : start + 2] for start in range(len(piece) - 1)]
            else:
                words.append(piece)
        return words

    def term(self, word: str) -> str | None:
        """The term that a word is indexed under, None for a stop word."""
        return None if word in self._stopwords else self._stem(word)

    def settings(self) -> dict[str, str | list[str] | None]:
        """`language`, `stemmer` and `stopwords`, as a manifest holds them."""
        return {"language": self.language, "stemmer": self.stemmer, "stopwords": self.stopwords}
