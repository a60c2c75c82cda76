"""Token ids of numbered texts: made once and kept flat while they fit a budget, made each time where they do not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.training.ragged import Ragged, ranges, starts_of

logger = logging.getLogger(__name__)

TEXTS_AT_ONCE = 20_000
SAMPLE = 256


class TokenStore:
    """Token ids by number of the text.

    Args:
        size: number of texts.
        every: a pass over all of them, in order.
        some: the texts of some numbers.
        tokenise: texts → token ids (shortlist.retrieval.tokens.Tokens), truncated.
        budget: bytes that kept token ids may take, 4 a token; None keeps them whatever they take.
        told: what to say of texts that were cut, with the texts cut and the longest's length as its arguments.
    """

    def __init__(
        self,
        size: int,
        every: Callable[[], Iterable[str]],
        some: Callable[[NDArray[np.integer]], list[str]],
        tokenise: Callable[[list[str]], Any],
        *,
        budget: int | None,
        told: str | None = None,
    ):
        self.size = size
        self.budget = budget
        self._every = every
        self._some = some
        self._tokenise = tokenise
        self._told = told
        self._kept: tuple[Ragged, NDArray[np.int32]] | None = None
        self._shape: Any = None

    def __len__(self) -> int:
        return self.size

    @cached_property
    def keep(self) -> bool:
        """Whether all token ids are made at the first use and kept; judged by the length of a few texts."""
        if self.budget is None or not self.size:
            return True
        few = self._tokenise(self._some(np.unique(np.linspace(0, self.size - 1, SAMPLE).astype(np.int64))))
        return 4 * self.size * float(few.lengths.mean()) <= self.budget

    def tokens(self, numbers: NDArray[np.integer]) -> Any:
        """Token ids of the texts of `numbers`, in their order."""
        numbers = np.asarray(numbers, np.int64)
        if not self.keep:
            return self._tokenise(self._some(numbers))
        kept, full = self._all()
        starts, lengths = kept.starts[numbers], kept.starts[numbers + 1] - kept.starts[numbers]
        ids = kept.items[ranges(starts, lengths)].astype(np.int64)
        return replace(self._shape, ids=ids, lengths=lengths, full_lengths=full[numbers].astype(np.int64))

    def lengths(self, numbers: NDArray[np.integer]) -> NDArray[np.int64]:
        """Token counts of the texts of `numbers`; characters where token ids are not kept (an order needs no more)."""
        if not self.keep:
            return np.fromiter(map(len, self._some(np.asarray(numbers, np.int64))), np.int64, len(numbers))
        starts = self._all()[0].starts
        return starts[np.asarray(numbers) + 1] - starts[numbers]

    def _all(self) -> tuple[Ragged, NDArray[np.int32]]:
        if self._kept is None:
            ids, lengths, full = [], [], []
            texts = iter(self._every())
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
