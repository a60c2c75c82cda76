"""Export: an index written as the files that another system's own loader takes, with the commands that load them.

```python
export_index(open_index("index"), "qdrant", "for-qdrant")     # or: shortlist export index --to qdrant -o for-qdrant
```

The output is a directory: the system's files, `LOAD.md` with the commands or the short script that load and query them,
and `manifest.json`. An export is a copy: later changes of the index are not in it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shortlist._version import __version__
from shortlist.errors import ConfigError, DataError
from shortlist.files import atomic_directory, refuse_existing, sha256, write_json
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.exporters import jsonl, lancedb, milvus, npy, opensearch, parquet, pgvector, qdrant
from shortlist.indexes.exporters.rows import Outcome, Rows, Source, read_rows, render

GUIDE, MANIFEST = "LOAD.md", "manifest.json"
FORMAT, FORMAT_VERSION = "shortlist-export", 1
_UNIT = 1e-3  # how far from 1 the length of a normalised vector may be


@dataclass(frozen=True)
class Target:
    """A system that an index can be exported to: its name, the dimensions it takes, and who writes its files."""

    title: str
    write: Callable[[Iterable[Rows], Source, Path], Outcome]
    guide: Callable[[Source, Outcome], str]
    max_dim: int | None = None
    min_dim: int = 1


TARGETS: dict[str, Target] = {
    "npy": Target("NumPy", npy.write, npy.guide),
    "jsonl": Target("JSON lines", jsonl.write, jsonl.guide),
    "parquet": Target("Parquet", parquet.write, parquet.guide),
    "qdrant": Target("Qdrant", qdrant.write, qdrant.guide, max_dim=65_536),
    "milvus": Target("Milvus", milvus.write, milvus.guide, max_dim=32_768, min_dim=2),
    "lancedb": Target("LanceDB", lancedb.write, lancedb.guide),
    "opensearch": Target("OpenSearch", opensearch.write, opensearch.guide, max_dim=16_000),
    "pgvector": Target("PostgreSQL with pgvector", pgvector.write, pgvector.guide, max_dim=16_000),
}


@dataclass(frozen=True)
class Export:
    """What was exported: where to, how many vectors of which length, bytes, and what the reader must know of it."""

    to: str
    output: Path
    count: int
    dim: int
    metric: str
    documents: bool
    bytes: int
    notes: tuple[str, ...]


def export_index(
    index: VectorIndex,
    to: str,
    output: str | os.PathLike[str],
    *,
    documents: bool = True,
    name: str = "documents",
    gzip: bool = False,
    reconstruct: bool = False,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Export:
    """Write what is in `index` as the files that the loader of `to` takes; removed documents are left out.

    Memory holds one part of about 8 MB and what its conversion takes, whatever the size of the index. Equal input gives
    equal bytes.

    Args:
        index: an opened index of any kind.
        to: a name of `TARGETS`.
        output: directory to write; it appears when it is complete.
        documents: write titles, texts and fields too, where the index stores them.
        name: of the collection or table that the commands in LOAD.md make.
        gzip: compress, for "jsonl".
        reconstruct: accept the approximate vectors of an index that compresses them and keeps no exact ones.
        overwrite: replace what is at `output`.
        progress: called with the number of documents written since the last call.

    Raises:
        ConfigError: an unknown system, a name or an option it does not take, more dimensions than it takes, or an index
            without exact vectors and no `reconstruct`.
        OutputExistsError: `output` exists and `overwrite` is false.
        DataError: an empty index, or a document that the system cannot take; it is named.
    """
    target = check_target(to)
    refuse_existing(Path(output), overwrite=overwrite)
    source, notes = _source(index, to, documents=documents, name=name, gzip=gzip, reconstruct=reconstruct)
    seen = _Seen()
    with atomic_directory(output, overwrite=overwrite) as directory:
        outcome = target.write(seen.watch(read_rows(index, documents=source.documents), progress), source, directory)
        if seen.count != source.count:
            raise DataError(
                f"the index gave {seen.count:,} of its {source.count:,} vectors; nothing was written: check it with "
                "shortlist.indexes.verify or build it again."
            )
        notes += outcome.notes
        guide = _head(index, source, target, seen, notes) + "\n" + target.guide(source, outcome)
        (directory / GUIDE).write_bytes(guide.encode())
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(directory.iterdir())
        }
        size = sum(file.stat().st_size for file in directory.iterdir())
        write_json(directory / MANIFEST, _manifest(index, to, source, seen, notes) | {"files": files})
    path, documents = Path(output), source.documents
    return Export(to, path, source.count, source.dim, source.metric, documents, size, tuple(notes))


def check_target(to: str) -> Target:
    """The target named `to`; raises ConfigError, with the names there are, for another."""
    if to not in TARGETS:
        near = difflib.get_close_matches(to, TARGETS, 1)
        raise ConfigError(
            f"an index cannot be exported to {to!r}{f'; did you mean {near[0]!r}?' if near else ';'} expected "
            f"{', '.join(list(TARGETS)[:-1])} or {list(TARGETS)[-1]}."
        )
    return TARGETS[to]


def _source(
    index: VectorIndex, to: str, *, documents: bool, name: str, gzip: bool, reconstruct: bool
) -> tuple[Source, list[str]]:
    """What is to be written, after checking that it can be; and what is to be said about it."""
    target, notes = TARGETS[to], []
    if gzip and to != "jsonl":
        raise ConfigError(f"gzip is for jsonl; the loader of {target.title} takes its files as they are.")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,47}", name):
        raise ConfigError(
            f"the name {name!r} does not suit every system: expected a small letter, then up to 47 of a-z, 0-9 and _."
        )
    if not len(index):
        raise DataError("the index is empty: there is nothing to export.")
    if not target.min_dim <= index.dim <= (target.max_dim or index.dim):
        limit = f"at least {target.min_dim}" if index.dim < target.min_dim else f"at most {target.max_dim:,}"
        raise ConfigError(f"the vectors have {index.dim:,} dimensions; {target.title} takes {limit}.")
    if not index.lossless:
        if not reconstruct:
            raise ConfigError(
                f"{index!r} keeps compressed vectors only, so that an export would hold approximations of those that "
                "were added; build the index with exact vectors beside it (a spec that ends in +rescore), or accept "
                "the approximations (--reconstruct, in Python reconstruct=True)."
            )
        notes.append(
            "the index keeps compressed vectors only: these are approximations of the vectors that were added, and "
            "scores differ accordingly."
        )
    if documents and index.documents is None:
        notes.append("the index stores no documents: only ids and vectors are here.")
    fields = None
    if documents and index.documents is not None:
        fields = index.documents.fields.types
    return Source(len(index), index.dim, index.metric, name, fields, gzip), notes


@dataclass
class _Seen:
    """What passed: the number of documents and the shortest and longest vector."""

    count: int = 0
    shortest: float = math.inf
    longest: float = 0.0

    def watch(self, rows: Iterable[Rows], progress: Callable[[int], object] | None) -> Iterator[Rows]:
        for part in rows:
            lengths = np.linalg.norm(part.vectors, axis=1)
            self.shortest = min(self.shortest, float(lengths.min()))
            self.longest = max(self.longest, float(lengths.max()))
            self.count += len(part)
            yield part
            if progress is not None:
                progress(len(part))

    @property
    def normalised(self) -> bool:
        return self.shortest > 1 - _UNIT and self.longest < 1 + _UNIT


def _manifest(index: VectorIndex, to: str, source: Source, seen: _Seen, notes: list[str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "written_by": f"shortlist {__version__}",
        "to": to,
        "name": source.name,
        "count": source.count,
        "dim": source.dim,
        "metric": source.metric,
        "dtype": "float32",
        "exact": index.lossless,
        "normalised": seen.normalised,
        "documents": source.documents,
        "fields": dict(source.fields or {}),
        "frequency_prior": index.frequency_prior,
        # Where the model lies is told relative to the index, which the export has left.
        "model": {key: value for key, value in index.model.items() if key != "path"},
        "notes": notes,
    }


def _head(index: VectorIndex, source: Source, target: Target, seen: _Seen, notes: list[str]) -> str:
    """What the vectors are and how a query becomes one, for the top of LOAD.md."""
    metric = {"ip": "the inner product", "l2": "the negated squared Euclidean distance"}[source.metric]
    length = (
        "All vectors have length 1, so that the inner product is the cosine."
        if seen.normalised
        else f"The vectors have lengths from {seen.shortest:.4g} to {seen.longest:.4g}: do not let a system normalise "
        "them, cosine ranks differently."
    )
    remarks = "".join(f"\n- Note: {note}" for note in notes)
    return render(_HEAD, title=target.title, count=f"{source.count:,}", dim=source.dim, metric=metric, length=length,
                  remarks=remarks, query=_query(index))  # fmt: skip


def _query(index: VectorIndex) -> str:
    model, name = index.model, index.model.get("name")
    if not model:
        return "The index does not say which model made the vectors; a query needs the same one."
    prior = "" if index.frequency_prior is None else _PRIOR
    return render(
        _MODEL,
        model=name or "MODEL",
        prior=prior,
        numpy="import numpy as np\n\n" if prior else "",
        fingerprint=str(model.get("fingerprint", "unknown"))[:16],
    ).rstrip()


_PRIOR = """
vector = np.append(vector, 0.0)  # the last coordinate weighs the label frequency (--frequency-bias); 0 leaves it out"""
_MODEL = """
The vector of a query is made by the model that made these (`$model`, fingerprint $fingerprint…):

```python
${numpy}from shortlist import DualEncoder

vector = DualEncoder.from_pretrained("$model").encode_queries(["the text of a query"])[0]$prior
```"""
_HEAD = """
# Loading this export into $title

- $count vectors of $dim float32 numbers; the score is $metric, and the search below gives the scores of shortlist.
- $length
- `manifest.json` has the number of documents, the model and the SHA-256 of every file.$remarks

$query
"""
