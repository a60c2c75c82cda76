"""Token ids of numbered texts: made once and kept flat for small collections, made each time for large ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.training.ragged import Ragged, ranges, starts_of

logger = logging.getLogger(__name__)

TEXTS_AT_ONCE = 20_000


class TokenStore:
    """Token ids by number of the text.

    Args:
        size: number of texts.
        texts: a pass over all of them, in order.
        text: the text of one number.
        tokenise: texts → token ids (shortlist.retrieval.tokens.Tokens), truncated.
        keep: make all token ids at the first use and keep them, 4 bytes a token.
        told: what to say of texts that were cut, with the texts cut and the longest's length as its arguments.
    """

    def __init__(
        self,
        size: int,
        texts: Callable[[], Iterable[str]],
        text: Callable[[int], str],
        tokenise: Callable[[list[str]], Any],
        *,
        keep: bool,
        told: str | None = None,
    ):
        self.size = size
        self.keep = keep
        self._texts = texts
        self._text = text
        self._tokenise = tokenise
        self._told = told
        self._kept: tuple[Ragged, NDArray[np.int32]] | None = None
        self._shape: Any = None

    def __len__(self) -> int:
        return self.size

    def tokens(self, numbers: NDArray[np.integer]) -> Any:
        """Token ids of the texts of `numbers`, in their order."""
        numbers = np.asarray(numbers, np.int64)
        if not self.keep:
            return self._tokenise([self._text(number) for number in numbers.tolist()])
        kept, full = self._all()
        starts, lengths = kept.starts[numbers], kept.starts[numbers + 1] - kept.starts[numbers]
        ids = kept.items[ranges(starts, lengths)].astype(np.int64)
        return replace(self._shape, ids=ids, lengths=lengths, full_lengths=full[numbers].astype(np.int64))

    def lengths(self, numbers: NDArray[np.integer]) -> NDArray[np.int64]:
        """Token counts of the texts of `numbers`; characters where token ids are not kept (an order needs no more)."""
        if not self.keep:
            return np.fromiter((len(self._text(number)) for number in numbers.tolist()), np.int64, len(numbers))
        starts = self._all()[0].starts
        return starts[np.asarray(numbers) + 1] - starts[numbers]

    def _all(self) -> tuple[Ragged, NDArray[np.int32]]:
        if self._kept is None:
            ids, lengths, full = [], [], []
            texts = iter(self._texts())
            while part := list(islice(texts, TEXTS_AT_ONCE)):
                tokens = self._tokenise(part)
                ids.append(tokens.ids.astype(np.int32))
                lengths.append(tokens.lengths)
                full.append(tokens.full_lengths.astype(np.int32))
            self._shape = tokens
            flat = Ragged(starts_of(np.concatenate(lengths)), np.concatenate(ids))
            self._kept = flat, np.concatenate(full)
            longer = self._kept[1] > flat.lengths
            if self._told and longer.any():
                logger.warning(self._told, int(longer.sum()), self.size, int(self._kept[1].max()))
        return self._kept
