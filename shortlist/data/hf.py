"""Hugging Face data sets on disk: `save_to_disk` folders and parquet files with query, positive, negative columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.data.collection import SPLIT_ORDER, Collection
from shortlist.data.documents import RankedList
from shortlist.data.lines import LineErrors
from shortlist.data.list_collection import collection_of_lists
from shortlist.data.list_shapes import parse_list
from shortlist.data.lists import complete_lists
from shortlist.data.options import ReadOptions
from shortlist.errors import DataError

if TYPE_CHECKING:
    import datasets


def is_hf(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk` or holds parquet files (directly or in `data/`)."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file() or bool(_parquet(folder))


def is_hf_file(path: Path) -> bool:
    """Whether a file is parquet, by its first bytes."""
    with open(path, "rb") as handle:
        return handle.read(4) == b"PAR1"


def read_hf(path: Path, options: ReadOptions) -> Collection:
    """Open a data set of lists by column names; a row is one list (shapes as in shortlist.data.lists).

    Raises:
        DataError: columns of no known names, listed with what is accepted; a damaged file.
    """
    splits = _open(path)
    for split, rows in splits.items():
        if not len(rows):
            raise DataError(f"{path}, split {split!r} has no rows; remove it or fill it.")
        try:
            parse_list(_present(rows[0]), f"{path}, split {split!r}, row 1")
        except DataError as error:
            raise DataError(
                f"{path}: the columns {', '.join(map(repr, rows.column_names))} were not understood; rename them to "
                f"'query', 'positive', 'negative' (or 'negative_1' …) and 'score'. {error}"
            ) from None
    readers = {split: partial(_lists, rows, f"{path}, split {split!r}", options) for split, rows in splits.items()}
    files = sorted(file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    return collection_of_lists(
        readers, options, name=path.resolve().name.split(".")[0], path=path, files=files, kind="hf"
    )


def lists_from_dataset(
    dataset: datasets.Dataset, *, name: str = "data set", on_error: str = "fail"
) -> Iterator[RankedList]:
    """Stream the lists of a `datasets.Dataset` that is already open."""
    return _lists(dataset, name, ReadOptions(on_error=on_error))


def _lists(rows: datasets.Dataset, source: str, options: ReadOptions) -> Iterator[RankedList]:
    records = ((f"{source}, row {number}", _present(row)) for number, row in enumerate(rows, 1))
    return complete_lists(records, source, errors=LineErrors(options.on_error))


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without its null cells: a table has every column in every row."""
    return {name: value for name, value in row.items() if value is not None}


def _open(path: Path) -> dict[str, datasets.Dataset]:
    import pyarrow as pa
    from datasets import Dataset, DatasetDict, load_from_disk

    try:
        if path.is_file():
            return {"train": Dataset.from_parquet(str(path))}
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            opened = load_from_disk(str(path))
            return dict(opened) if isinstance(opened, DatasetDict) else {"train": opened}
        by_split: dict[str, list[str]] = {}
        for file in _parquet(path):
            # "train-00000-of-00002.parquet" is a shard of "train".
            stem = file.stem.split("-")[0]
            by_split.setdefault(stem if stem in SPLIT_ORDER else "train", []).append(str(file))
        return {split: Dataset.from_parquet(files) for split, files in by_split.items()}
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path} could not be opened as a Hugging Face data set: {error}") from error


def _parquet(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))
