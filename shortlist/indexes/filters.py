"""Filters of a search: by id, by position and by the fields of the documents, joined with and, or, not.

```python
index.search(vectors, 10, filter="year >= 2010 and lang in ['en', 'de'] and not draft")
index.search(vectors, 10, filter=(field("year") >= 2010) & field("lang").isin(["en", "de"]) & ~(field("draft") == True))
index.search(vectors, 10, filter={"d1", "d7"})
```

A filter becomes a mask over the positions of an index before anything is scored. A document without the field matches
no comparison, neither `==` nor `!=`; `not` is plain negation, so `not year == 2010` also takes documents without a
year. A list field is equal to each value that it holds.
"""

from __future__ import annotations

import abc
import keyword
import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from shortlist.errors import ConfigError
from shortlist.indexes.fields import ID
from shortlist.indexes.hashing import encode
from shortlist.indexes.matching import ORDERS, Mask, matches
from shortlist.types import string_id

if TYPE_CHECKING:
    from shortlist.indexes.fields import FieldStore
    from shortlist.indexes.ids import IdTable

_CACHED_MASKS, _CACHED_BYTES = 16, 256 << 20  # an index
_NOUNS = {"bool": "True or False", "int": "a number", "float": "a number", "string": "a string"}


class Filterable(Protocol):
    """What a filter looks at: `VectorIndex` and `LexicalRetriever`."""

    @property
    def _ids(self) -> IdTable: ...

    @property
    def fields(self) -> FieldStore | None:
        """The columns of the documents, None where none are stored."""
        ...


class Filter(abc.ABC):
    """Which positions of an index a search may return; combine with `&`, `|` and `~`."""

    def mask(self, index: Filterable) -> Mask:
        """True where a position may be returned, `(positions,)`, removed ones included; read-only.

        The masks of the last filters are kept until the index changes.

        Raises:
            ConfigError: a field that the index does not have, or a value of another type than the field's.
        """
        table = index._ids
        cached = _masks(table).get(self, table.version)
        if cached is None:
            cached = self._evaluate(index)
            cached.setflags(write=False)
            _masks(table).put(self, table.version, cached)
        return cached

    @abc.abstractmethod
    def _evaluate(self, index: Filterable) -> Mask:
        """A new mask."""

    @abc.abstractmethod
    def names(self) -> frozenset[str]:
        """The fields that are looked at."""

    def __and__(self, other: Filter) -> Filter:
        return AllOf((self, _checked(other, "&")))

    def __or__(self, other: Filter) -> Filter:
        return AnyOf((self, _checked(other, "|")))

    def __invert__(self) -> Filter:
        return Negation(self)

    def __bool__(self) -> bool:
        raise ConfigError(
            f"the filter {self} is neither true nor false by itself: join filters with & | ~ in place of and, or, not, "
            "and write (field('year') >= 2000) & (field('year') < 2010) in place of a chained comparison; or pass the "
            "whole expression as a string."
        )


@dataclass(frozen=True)
class Ids(Filter):
    """The documents of a set of ids; those that the index does not hold are passed over."""

    wanted: frozenset[str]

    def _evaluate(self, index: Filterable) -> Mask:
        found = index._ids.find(list(self.wanted))
        mask = np.zeros(len(index._ids), bool)
        mask[found[found >= 0]] = True
        return mask

    def names(self) -> frozenset[str]:
        """No field."""
        return frozenset()

    def __str__(self) -> str:
        shown = sorted(self.wanted)[:3]
        return f"id in [{', '.join(map(repr, shown))}{', …' if len(self.wanted) > 3 else ''}]"


@dataclass(frozen=True)
class Positions(Filter):
    """The positions from `start` to before `stop`, as a scan of one part of an index takes them."""

    start: int
    stop: int

    def _evaluate(self, index: Filterable) -> Mask:
        mask = np.zeros(len(index._ids), bool)
        mask[self.start : self.stop] = True
        return mask

    def names(self) -> frozenset[str]:
        """No field."""
        return frozenset()

    def __str__(self) -> str:
        return f"positions {self.start} to {self.stop}"


@dataclass(frozen=True)
class AllOf(Filter):
    """What every part matches."""

    parts: tuple[Filter, ...]

    def _evaluate(self, index: Filterable) -> Mask:
        return np.logical_and.reduce([part._evaluate(index) for part in self.parts])

    def names(self) -> frozenset[str]:
        """The fields of all parts."""
        return frozenset().union(*(part.names() for part in self.parts))

    def __str__(self) -> str:
        return f"({' and '.join(map(str, self.parts))})"


@dataclass(frozen=True)
class AnyOf(Filter):
    """What at least one part matches."""

    parts: tuple[Filter, ...]

    def _evaluate(self, index: Filterable) -> Mask:
        return np.logical_or.reduce([part._evaluate(index) for part in self.parts])

    def names(self) -> frozenset[str]:
        """The fields of all parts."""
        return frozenset().union(*(part.names() for part in self.parts))

    def __str__(self) -> str:
        return f"({' or '.join(map(str, self.parts))})"


@dataclass(frozen=True)
class Negation(Filter):
    """What a filter does not match, documents without the field included."""

    part: Filter

    def _evaluate(self, index: Filterable) -> Mask:
        return ~self.part._evaluate(index)

    def names(self) -> frozenset[str]:
        """The fields of the part."""
        return self.part.names()

    def __str__(self) -> str:
        return f"not {self.part}"


@dataclass(frozen=True)
class Comparison(Filter):
    """One field against one value, or against several for "in" and "not in"; a missing value matches none of them."""

    name: str
    op: str
    value: Any
    # 1, 1.0 and True are equal in Python but not to a field: without the types one would find the other's cached mask.
    types: tuple[type, ...] = dataclass_field(init=False, repr=False)

    def __post_init__(self) -> None:
        values = tuple(self.value) if self.op in ("in", "not in") else (self.value,)
        plain = tuple(_literal(value, self) for value in values)
        object.__setattr__(self, "value", plain if self.op in ("in", "not in") else plain[0])
        object.__setattr__(self, "types", tuple(map(type, plain)))

    def _evaluate(self, index: Filterable) -> Mask:
        values = self.value if self.op in ("in", "not in") else (self.value,)
        if self.name == ID:
            self._check("string", values)
            if self.op in ("==", "in"):
                return Ids(frozenset(values))._evaluate(index)
            return matches(index._ids.column(), len(index._ids), "string", self.op, values)
        store = _column_store(index, self.name, self)
        kind = store.types[self.name]
        self._check(kind, values)
        return matches(store.column(self.name), len(index._ids), kind, self.op, values)

    def _check(self, kind: str, values: tuple[Any, ...]) -> None:
        """Refuse a comparison that can only be a mistake: of another type than the field, or an order of bools."""
        item = kind.removeprefix("list of ")
        for value in values:
            fits = {"bool": isinstance(value, bool), "string": isinstance(value, str)}.get(
                item, isinstance(value, (int, float)) and not isinstance(value, bool)
            )
            if not fits:
                raise ConfigError(
                    f"filter {self}: the field {self.name!r} is {_article(kind)}; compare it with {_NOUNS[item]}, "
                    f"not with {value!r}."
                )
        if self.op in ORDERS and (item == "bool" or item != kind):
            raise ConfigError(
                f"filter {self}: the field {self.name!r} is {_article(kind)}, which has no order; use ==, !=, in or "
                "not in."
            )

    def names(self) -> frozenset[str]:
        """The field."""
        return frozenset((self.name,))

    def __str__(self) -> str:
        return f"{_shown(self.name)} {self.op} {list(self.value) if isinstance(self.value, tuple) else self.value!r}"


@dataclass(frozen=True)
class Known(Filter):
    """The documents that have a value in a field."""

    name: str

    def _evaluate(self, index: Filterable) -> Mask:
        mask = np.zeros(len(index._ids), bool)
        if self.name == ID:
            return ~mask
        for start, array in _column_store(index, self.name, self).column(self.name):
            mask[start : start + len(array)] = array.is_valid().to_numpy(zero_copy_only=False)
        return mask

    def names(self) -> frozenset[str]:
        """The field."""
        return frozenset((self.name,))

    def __str__(self) -> str:
        return f"{_shown(self.name)} is not None"


class Field:
    """A field by name, for filters written in Python: `field("year") >= 2010`; see `field`."""

    def __init__(self, name: str):
        self.name = name

    def isin(self, values: Iterable[Any]) -> Filter:
        """The documents whose value is one of `values`."""
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise ConfigError(
                f"field({self.name!r}).isin takes a list of values, not {values!r}; compare with one value by ==."
            )
        return Comparison(self.name, "in", tuple(values))

    def known(self) -> Filter:
        """The documents that have a value; `~field(name).known()` those that have none."""
        return Known(self.name)

    def __eq__(self, value: object) -> Filter:  # type: ignore[override]
        return Comparison(self.name, "==", value)

    def __ne__(self, value: object) -> Filter:  # type: ignore[override]
        return Comparison(self.name, "!=", value)

    def __lt__(self, value: Any) -> Filter:
        return Comparison(self.name, "<", value)

    def __le__(self, value: Any) -> Filter:
        return Comparison(self.name, "<=", value)

    def __gt__(self, value: Any) -> Filter:
        return Comparison(self.name, ">", value)

    def __ge__(self, value: Any) -> Filter:
        return Comparison(self.name, ">=", value)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ConfigError(
            f"field({self.name!r}) is a field, not a condition; compare it: field({self.name!r}) == True."
        )

    def __repr__(self) -> str:
        return f"field({self.name!r})"


def field(name: str) -> Field:
    """The field `name` of the documents, to be compared: `field("year") >= 2010`, `field("lang").isin(["en", "de"])`.

    "id" is a field too: the document's id.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"field({name!r}): the name of a field is a non-empty string.")
    return Field(name)


def ids(wanted: Collection[Any] | str) -> Filter:
    """The documents of `wanted`; those that the index does not hold are passed over."""
    return Ids(frozenset([wanted] if isinstance(wanted, str) else [string_id(value, "document") for value in wanted]))


def positions(start: int, stop: int) -> Filter:
    """The positions from `start` to before `stop`: one range of an index that several workers scan."""
    if not 0 <= start <= stop:
        raise ConfigError(f"positions({start}, {stop}): expected 0 ≤ start ≤ stop.")
    return Positions(int(start), int(stop))


def as_filter(value: Any) -> Filter | None:
    """What a `filter=` argument means: a Filter as it is, a string as an expression, a collection as ids, None as all.

    Raises:
        ConfigError: an expression that cannot be read, or something else.
        DataError: an id that is no string.
    """
    if value is None or isinstance(value, Filter):
        return value
    if isinstance(value, str):
        from shortlist.indexes.expressions import parse_filter

        return parse_filter(value)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, dict)):
        return ids(list(value))
    raise ConfigError(
        f'filter is {value!r:.80}; expected an expression such as "year >= 2010", a filter made with field(…), or a '
        "set of document ids."
    )


def _checked(other: Any, sign: str) -> Filter:
    if not isinstance(other, Filter):
        raise ConfigError(
            f"{sign} joins two filters, not a filter and {other!r:.60}; put comparisons in parentheses: "
            "(field('year') >= 2010) & (field('lang') == 'en')."
        )
    return other


def _literal(value: Any, comparison: Comparison) -> str | int | float | bool:
    """A value to compare with as a plain Python one; numpy's scalars are taken."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(
            f"filter on {comparison.name!r}: NaN equals nothing; for documents without a value write "
            f"`{comparison.name} is None`, in Python ~field({comparison.name!r}).known()."
        )
    if isinstance(value, str):
        encode(value)
    if isinstance(value, (str, int, float)):
        return value
    if value is None:
        raise ConfigError(
            f"filter on {comparison.name!r}: None is no value to compare with; write `{comparison.name} is None` or "
            f"`{comparison.name} is not None`, in Python field({comparison.name!r}).known()."
        )
    raise ConfigError(
        f"filter on {comparison.name!r}: {value!r:.60} is a {type(value).__name__}; compare with a number, a string, "
        "True or False."
    )


def _shown(name: str) -> str:
    """A field as an expression names it."""
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"field({name!r})"


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "int" else f"a {kind}"


def _column_store(index: Filterable, name: str, shown: Filter) -> FieldStore:
    """The columns of `index`, which must hold `name`; ConfigError with the nearest name otherwise."""
    from shortlist.settings import nearest

    store = index.fields
    if store is None or not store.names:
        raise ConfigError(
            f"filter {shown}: the documents of this index have no fields, only ids; build it with its documents stored "
            "and with metadata in the corpus (further keys of a document in corpus.jsonl), or filter by id."
        )
    if name not in store.names:
        listed = ", ".join([ID, *store.names[:20]]) + (", …" if len(store.names) > 20 else "")
        hint = nearest(name, [ID, *store.names])
        raise ConfigError(f"filter {shown}: there is no field {name!r}{hint or '.'} The fields are {listed}.")
    return store


class _Masks:
    """The last masks of one index, forgotten when its ids change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = -1
        self._masks: OrderedDict[Filter, Mask] = OrderedDict()

    def get(self, filter: Filter, version: int) -> Mask | None:
        with self._lock:
            if version != self._version or filter not in self._masks:
                return None
            self._masks.move_to_end(filter)
            return self._masks[filter]

    def put(self, filter: Filter, version: int, mask: Mask) -> None:
        with self._lock:
            if version != self._version:
                self._masks.clear()
                self._version = version
            self._masks[filter] = mask
            while len(self._masks) > min(_CACHED_MASKS, max(1, _CACHED_BYTES // max(1, len(mask)))):
                self._masks.popitem(last=False)


_TABLES: WeakKeyDictionary[IdTable, _Masks] = WeakKeyDictionary()
_TABLES_LOCK = threading.Lock()


def _masks(table: IdTable) -> _Masks:
    with _TABLES_LOCK:
        return _TABLES.setdefault(table, _Masks())
