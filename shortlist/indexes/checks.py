"""Checks of what comes into an index: vectors of the right shape, finite and not too large; documents of the ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from shortlist.errors import DataError, NonFiniteError
from shortlist.indexes.blocks import Vectors


def as_vectors(vectors: Any, dim: int) -> Vectors:
    """`vectors` as contiguous float32 with two dimensions; one vector of length `dim` may be given flat.

    Raises DataError for what is no array of numbers or has another number of dimensions.
    """
    try:
        if hasattr(vectors, "detach"):
            vectors = vectors.detach().cpu().float().numpy()
        given = np.asarray(vectors)
        # Kinds that numpy would turn into numbers without a word: complex, dates, records; and masked values.
        odd = given.dtype.kind in "cmMSU" or given.dtype.names is not None
        if given.size and (odd or np.ma.is_masked(vectors)):
            raise TypeError(f"their type is {given.dtype if odd else 'masked'}")
        array = np.ascontiguousarray(given, dtype=np.float32)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise DataError(f"vectors must be an array of numbers (n, {dim}): {error}.") from None
    if array.ndim == 1 and len(array) == dim:
        array = array[None]
    if array.size == 0 and array.ndim <= 2 and (array.ndim < 2 or not len(array)):
        return np.zeros((0, dim), np.float32)
    if array.ndim != 2:
        raise DataError(f"vectors have shape {array.shape}; expected two dimensions, (n, {dim}).")
    return array


def check_finite(vectors: Vectors, name: Callable[[int], str]) -> None:
    """Refuse NaN, infinities and values so large that a score would overflow; `name(row)` says whose it is.

    Raises NonFiniteError.
    """
    if not vectors.size:
        return
    limit = 1e18 / math.sqrt(vectors.shape[1])
    # max and min pass NaN on, so two reductions without a temporary array check everything.
    if vectors.max() <= limit and vectors.min() >= -limit:
        return
    bad = ~(np.isfinite(vectors).all(axis=1) & (np.abs(vectors) <= limit).all(axis=1))
    row = int(np.flatnonzero(bad)[0])
    value = vectors[row][~(np.abs(vectors[row]) <= limit)][0]
    raise NonFiniteError(
        f"{name(row)} holds {value} ({int(bad.sum())} such vectors); vectors must be finite and below 1e18 in length: "
        "find out where it was computed."
    )


def as_record(document: Mapping[str, Any]) -> Any:
    """A stored document as a record with id, title, text and metadata."""
    return SimpleNamespace(**{"id": None, "title": "", "text": "", "metadata": None, **document})


def check_documents(documents: Iterable[Any], ids: Sequence[str]) -> list[Any]:
    """`documents`, records or mappings with id, title, text and metadata, as a list that matches `ids` one by one.

    Raises DataError for one that is missing, too many, or of another id.
    """
    if not isinstance(documents, Iterable):
        raise DataError(f"documents are a {type(documents).__name__}; give a list with one for each id.")
    checked = [as_record(document) if isinstance(document, Mapping) else document for document in documents]
    if len(checked) != len(ids):
        raise DataError(f"{len(checked)} documents for {len(ids)} ids; give one for each id, in the same order.")
    for id, document in zip(ids, checked, strict=True):
        found = getattr(document, "id", None)
        if found != id:
            raise DataError(f"the vector of {id!r} meets document {found!r}; both must be in the same order.")
        metadata = getattr(document, "metadata", None)
        if metadata is not None and not isinstance(metadata, Mapping):
            raise DataError(f"the metadata of document {id!r} are a {type(metadata).__name__}; expected a mapping.")
    return checked
