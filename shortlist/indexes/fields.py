"""The fields of the documents as columns: what filters compare, read from Arrow files without loading them.

A column comes from one key of `Document.metadata`. Its type is inferred: bool, int, float, string, or a list of one of
them. Whole numbers beside fractions become floats, single values beside lists become lists of one, and what fits
nothing else (text beside numbers, nested objects) is kept as text. A missing key, null and NaN are missing values.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from shortlist.errors import DataError

logger = logging.getLogger(__name__)

FIELDS = "fields.arrow"
ID = "id"  # in a filter the id of the document, so no field of metadata can have this name

_MOST_FIELDS = 500
_BATCH_ROWS, _BATCH_VALUES = 65_536, 4 << 20
_PENDING = 16_384  # added documents that are turned into columns anew for the next filter
_ITEMS: dict[str | None, pa.DataType] = {
    "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "string": pa.large_string(), None: pa.null(),
}  # fmt: skip
_NAMES = {arrow: item for item, arrow in _ITEMS.items()}
_PLAIN = {bool: "bool", float: "float", str: "string"}
_AS_IT_IS = (str, int, bool)


class Kind(NamedTuple):
    """The type of a field: what a value is, None if none was seen yet, and whether a document holds several."""

    item: str | None
    many: bool = False

    @classmethod
    def of(cls, value: Any) -> Kind:
        """The type of one JSON value."""
        kind = _PLAIN.get(type(value))
        if kind is not None:
            return cls(None if value != value else kind)
        if type(value) is int:
            return cls("int" if -(2**63) <= value < 2**63 else "string")
        if value is None:
            return cls(None)
        if isinstance(value, list):
            item: Kind = cls(None)
            for one in value:
                item = item.joined(cls("string") if isinstance(one, list) else cls.of(one))
            return cls(item.item, many=True)
        return cls("string")

    @classmethod
    def parse(cls, name: str) -> Kind:
        """The type with the name `name`."""
        return cls(name.removeprefix("list of "), name.startswith("list of "))

    def joined(self, other: Kind) -> Kind:
        """The type that holds the values of both."""
        items = {self.item, other.item} - {None}
        item = items.pop() if len(items) == 1 else "float" if items == {"int", "float"} else "string" if items else None
        return Kind(item, self.many or other.many)

    def conflicts(self, other: Kind) -> bool:
        """Whether values of these types can only be kept together as text."""
        return self.joined(other).item == "string" and bool({self.item, other.item} - {None, "string"})

    @property
    def arrow(self) -> pa.DataType:
        """The type of the column."""
        item = _ITEMS[self.item]
        return pa.list_(item) if self.many else item

    def __str__(self) -> str:
        return ("list of " if self.many else "") + (self.item or "string")

    def values(self, value: Any) -> Any:
        """A JSON value as one of this type; None if it is missing."""
        if value is None or value != value:
            return None
        if not self.many:
            return self._one(value)
        several = value if isinstance(value, list) else [value]
        return [self._one(one) for one in several if one is not None and one == one]

    def _one(self, value: Any) -> Any:
        if self.item == "string":
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return float(value) if self.item == "float" else value


class FieldTypes:
    """The types of the fields, joined over the documents that were seen."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self._seen: set[tuple[str, bool, type | None]] = set()
        self._said: set[str] = set()

    def observe(self, metadata: Mapping[str, Any]) -> None:
        """Take the values of one document into account."""
        for name, value in metadata.items():
            # Nearly all values are of a type that this field was seen with before.
            many = type(value) is list
            types = set(map(type, value)) if many else {type(value)}
            key = (name, many, types.pop() if len(types) == 1 else None)
            if key in self._seen:
                continue
            if key[2] in (str, bool):
                # What an int, a float or a mixture is depends on its value, these do not.
                self._seen.add(key)
            self.join(name, Kind.of(value))

    def join(self, name: str, kind: Kind) -> None:
        """Widen the type of one field by `kind`; what becomes text for want of a common type is said once."""
        if name == ID:
            self._say(name, "a field named 'id' cannot be filtered by: in a filter, id is the id of the document")
            return
        known = self.kinds.get(name)
        if known is None:
            if len(self.kinds) >= _MOST_FIELDS:
                self._say("", f"the documents have more than {_MOST_FIELDS} fields; filters know the first of them")
                return
            self.kinds[name] = kind
            return
        if known.conflicts(kind):
            self._say(name, f"the field {name!r} holds {known} and {kind} values; filters compare all of them as text")
        self.kinds[name] = known.joined(kind)

    def _say(self, name: str, sentence: str) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.warning("%s", sentence)


def column_batches(metadata: Iterable[Mapping[str, Any] | None], kinds: Mapping[str, Kind]) -> Iterator[pa.RecordBatch]:
    """The documents' fields as columns, some thousands of documents at a time."""
    schema = pa.schema([(name, kind.arrow) for name, kind in kinds.items()])
    size = max(1, min(_BATCH_ROWS, _BATCH_VALUES // max(1, len(kinds))))
    rows: list[Mapping[str, Any]] = []
    for one in metadata:
        rows.append(one or {})
        if len(rows) == size:
            yield _batch(rows, kinds, schema)
            rows = []
    if rows:
        yield _batch(rows, kinds, schema)


def _batch(rows: list[Mapping[str, Any]], kinds: Mapping[str, Kind], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [_array([row.get(name) for row in rows], kind) for name, kind in kinds.items()]
    return pa.record_batch(arrays, schema=schema)


def _array(values: list[Any], kind: Kind) -> pa.Array:
    """JSON values as a column of `kind`."""
    if kind.many:  # a text is not the list of its characters
        values = [value if type(value) is list or value is None or value != value else [value] for value in values]
    try:
        # Arrow refuses what is of another type, and only then each value has to be looked at.
        return pa.array(values, kind.arrow, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return pa.array([kind.values(value) for value in values], kind.arrow)


def write_fields(file: Path, metadata: Iterable[Mapping[str, Any] | None], kinds: Mapping[str, Kind]) -> None:
    """Write the columns of the documents as an Arrow file, holding one batch of them."""
    schema = pa.schema([(name, kind.arrow) for name, kind in kinds.items()])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in column_batches(metadata, kinds):
            writer.write_batch(batch)


class _Part:
    """The columns of some consecutive positions: those of one segment, or of documents that were added."""

    def __init__(self, count: int, batches: Sequence[pa.RecordBatch], kinds: Mapping[str, Kind]):
        self.count, self.kinds, self._batches = count, kinds, batches
        self._converted: dict[tuple[str, Kind], list[pa.Array]] = {}

    @classmethod
    def open(cls, file: Path, count: int) -> _Part:
        """The columns in `file`, memory-mapped; none if there is no such file."""
        if not file.is_file():
            return cls(count, [], {})
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(file)))
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} is damaged ({str(error).splitlines()[0]}); build the index again.") from None
        rows = sum(batch.num_rows for batch in batches)
        if rows != count:
            raise DataError(f"{file} holds the fields of {rows} documents, expected {count}; build the index again.")
        kinds = {}
        for column in reader.schema:
            many = pa.types.is_list(column.type)
            item = column.type.value_type if many else column.type
            if item not in _NAMES:
                raise DataError(f"{file}: the field {column.name!r} is of the unknown type {column.type}.")
            kinds[column.name] = Kind(_NAMES[item], many)
        return cls(count, batches, kinds)

    def arrays(self, name: str, kind: Kind) -> list[pa.Array]:
        """The column `name` as values of `kind`, in pieces."""
        if name not in self.kinds:
            return []
        if kind == self.kinds[name]:
            return [batch.column(name) for batch in self._batches]
        if (name, kind) not in self._converted:
            self._converted[name, kind] = [_array(batch.column(name).to_pylist(), kind) for batch in self._batches]
        return self._converted[name, kind]


class FieldStore:
    """Columns by name over all segments of an index and the documents added since; position by position.

    Args:
        directories: the segments, in order.
        counts: the number of positions of each.
    """

    def __init__(self, directories: Sequence[Path] = (), counts: Sequence[int] = ()):
        self._parts = [
            _Part.open(directory / FIELDS, count) for directory, count in zip(directories, counts, strict=True)
        ]
        self._joined = FieldTypes()
        for part in self._parts:
            self.declare(part.kinds)
        self._pending: list[Mapping[str, Any] | None] = []
        self._pending_part: _Part | None = None

    def __len__(self) -> int:
        """Number of positions."""
        return sum(part.count for part in self._parts) + len(self._pending)

    @property
    def names(self) -> list[str]:
        """The fields, in the order in which they were met."""
        return list(self._joined.kinds)

    @property
    def types(self) -> dict[str, str]:
        """The type of each field: bool, int, float, string, or "list of" one of these."""
        return {name: str(kind) for name, kind in self._joined.kinds.items()}

    def declare(self, types: Mapping[str, Kind | str]) -> None:
        """Make fields known that no document here has, and widen types: what other parts of the same index hold."""
        for name, kind in types.items():
            self._joined.join(name, Kind.parse(kind) if not isinstance(kind, Kind) else kind)

    def append(self, metadata: Iterable[Mapping[str, Any] | None]) -> None:
        """Take the fields of the documents at the next positions; None for a document without any."""
        for one in metadata:
            self._pending.append(one)
            if one:
                self._joined.observe(one)
        self._pending_part = None
        if len(self._pending) >= _PENDING:
            self._parts.append(self._pending_columns())
            self._pending, self._pending_part = [], None

    def column(self, name: str) -> Iterator[tuple[int, pa.Array]]:
        """The column `name` in pieces, each with the position where it begins; what is in none has no value."""
        kind = self._joined.kinds[name]
        start = 0
        for part in [*self._parts, self._pending_columns()]:
            inside = start
            for array in part.arrays(name, kind):
                yield inside, array
                inside += len(array)
            start += part.count

    def values(self, position: int) -> dict[str, Any]:
        """The fields of the document at `position` that have a value."""
        found = {}
        for name in self.names:
            for start, array in self.column(name):
                if start <= position < start + len(array):
                    value = array[position - start].as_py()
                    if value is not None:
                        found[name] = value
        return found

    def _pending_columns(self) -> _Part:
        if self._pending_part is None:
            met = set().union(*(one for one in self._pending if one))
            kinds = {name: kind for name, kind in self._joined.kinds.items() if name in met}
            batches = list(column_batches(self._pending, kinds)) if kinds else []
            self._pending_part = _Part(len(self._pending), batches, kinds)
        return self._pending_part


def plain(value: Any) -> Any:
    """A value of metadata as JSON holds it: numpy's scalars as numbers, dates as ISO text, NaN as null."""
    if value is None or type(value) in _AS_IT_IS:
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): one if type(one) in _AS_IT_IS else plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [one if type(one) in _AS_IT_IS else plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(one) for one in value), key=str)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
