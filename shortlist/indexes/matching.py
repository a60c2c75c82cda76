"""One comparison over an Arrow column, vectorised, and exact: whole numbers and fractions compare as in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Mask = NDArray[np.bool_]

ORDERS = {"<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_TYPES = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "string": pa.large_string()}


def matches(column: Iterable[tuple[int, Any]], length: int, kind: str, op: str, values: tuple[Any, ...]) -> Mask:
    """The mask of one comparison over the Arrow arrays of a column, each with its first position."""
    test = _tester(kind.removeprefix("list of "), op, values)
    mask = np.zeros(length, bool)
    for start, array in column:
        part = mask[start : start + len(array)]
        if array.null_count == len(array):
            continue
        if kind.startswith("list of "):
            offsets = array.offsets.to_numpy()
            # Lists that hold nothing have no type to compare with.
            hits = np.concatenate([[0], np.cumsum(test(array.values) if len(array.values) else [])])
            held = hits[offsets[1:]] > hits[offsets[:-1]]
            part[:] = held ^ (op in ("!=", "not in"))
        else:
            part[:] = test(array) ^ (op in ("!=", "not in"))
        if array.null_count:
            part &= array.is_valid().to_numpy(zero_copy_only=False)
    return mask


def _tester(item: str, op: str, values: tuple[Any, ...]) -> Callable[[pa.Array], Mask]:
    """A function from an Arrow array to a numpy mask; "!=" and "not in" test for equality, the caller negates."""

    def plain(result: Any) -> Mask:
        return result.fill_null(False).to_numpy(zero_copy_only=False)

    if op in ORDERS:
        bound = values[0]
        if item == "float":
            op, bound = _real_bound(op, bound)
        elif item == "int":
            op, bound = _whole_bound(op, bound)
            if not -(2**63) <= bound < 2**63:
                matches_all = (bound > 0) == (op in ("<", "<="))
                return lambda array: np.full(len(array), matches_all)
        compare = ORDERS[op]
        scalar = pa.scalar(bound, _TYPES[item])
        return lambda array: plain(compare(array, _same_type(array, scalar)))
    if item == "int":
        values = tuple(int(value) for value in values if math.isfinite(value) and value == int(value))
        values = tuple(value for value in values if -(2**63) <= value < 2**63)
    elif item == "float":
        values = tuple(real for value in values if (real := _real(value)) == value)
    if not values:
        return lambda array: np.zeros(len(array), bool)
    if len(values) == 1:
        single = pa.scalar(values[0], _TYPES[item])
        return lambda array: plain(pc.equal(array, _same_type(array, single)))
    several = pa.array(list(values), _TYPES[item])
    return lambda array: plain(pc.is_in(array, value_set=_same_type(array, several), skip_nulls=True))


def _whole_bound(op: str, bound: float) -> tuple[str, int]:
    """A bound of whole numbers: x > 2009.5 is x >= 2010, exactly, with no int turned into a float."""
    if isinstance(bound, int):
        return op, bound
    if math.isinf(bound):
        return op, 2**63 if bound > 0 else -(2**63) - 1
    if bound == int(bound):
        return op, int(bound)
    return (">=", math.ceil(bound)) if op in (">", ">=") else ("<=", math.floor(bound))


def _real_bound(op: str, bound: float) -> tuple[str, float]:
    """A bound of fractions: where a large whole number is none, the next fraction and whether that is inside."""
    real = _real(bound)
    if real > bound:
        op = {">": ">=", "<=": "<"}.get(op, op)
    elif real < bound:
        op = {">=": ">", "<": "<="}.get(op, op)
    return op, real


def _real(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _same_type(array: Any, value: Any) -> Any:
    return value if array.type == value.type else value.cast(array.type)
