"""`shortlist tune`: search settings of an index for a recall and a latency, or another kind of index for them."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shortlist.commands.searchers import encoder_of
from shortlist.data import load_collection, read_queries
from shortlist.errors import ConfigError, IndexMismatchError
from shortlist.indexes import open_index
from shortlist.indexes.auto import check_targets, choose, parse_size, parse_time
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.rebuild import rebuild as rebuild_as
from shortlist.indexes.tune import SAMPLE, Tuning
from shortlist.indexes.tune import tune as tune_settings
from shortlist.retrieval.engine import progress_bar

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Targets:
    """What is asked of an index: recall among the k best, memory in bytes, median latency in seconds."""

    recall: float = 0.95
    memory: int | None = None
    latency: float | None = None
    k: int = 10

    @classmethod
    def parse(cls, recall: float | None, memory: str | None, latency: str | None, k: int | None) -> Targets:
        """Targets as they are written on a command line, such as "4GB" and "5ms". Raises ConfigError."""
        targets = cls(
            cls.recall if recall is None else recall,
            None if memory is None else parse_size(memory),
            None if latency is None else parse_time(latency),
            cls.k if k is None else k,
        )
        check_targets(recall=targets.recall, memory=targets.memory, latency=targets.latency, k=targets.k)
        return targets


def tune(
    *,
    index: str | os.PathLike[str],
    recall: float | None = None,
    memory: str | None = None,
    latency: str | None = None,
    k: int | None = None,
    data: str | Path | None = None,
    split: str | None = None,
    queries: str | os.PathLike[str] | None = None,
    rebuild: bool = False,
    model: str | os.PathLike[str] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
) -> dict[str, Any]:
    """Find, measure and store the cheapest settings that reach `recall`; prints one table and returns its figures.

    The vectors of the index are not written again, unless `rebuild` finds another kind better.

    Args:
        index: directory made by `shortlist index`.
        recall: share of the true k best to be found; 0.95 by default.
        memory: what searches may keep busy, such as "4GB".
        latency: what half of the single queries may take on one core, such as "5ms".
        k: results a query; 10 by default.
        data: collection whose queries are the sample; without it and `queries`, stored vectors are.
        split: of `data`; by default the one the collection reports on. Tune on dev, not on test.
        queries: a file of queries (JSON lines or tsv).
        rebuild: choose the kind anew as `shortlist index --index auto` does, and build it if it is another.
        model: dual encoder of the queries; by default the one the index was built with.
        device: of the model.
        dtype: of the model's computation.
        as_json: print JSON in place of the table.

    Raises:
        ConfigError: a target that is no number, out of range or impossible, or no queries.
        IndexMismatchError: `model` is not the one of the index.
        DataError: `rebuild` of an index that holds compressed codes only.
    """
    targets = Targets.parse(recall, memory, latency, k)
    path = Path(index)
    texts = sample_texts(data, split, queries)
    opened = open_index(path, device="cpu")
    vectors = None
    if texts is not None:
        encoder = encoder_of(path, opened.model, model, device, dtype)
        if opened.model.get("fingerprint") not in (None, encoder.fingerprint):
            raise IndexMismatchError(
                f"{path} was built with {opened.model.get('name') or 'a model'} (fingerprint "
                f"{opened.model['fingerprint']}), the queries would be encoded by {encoder.source} (fingerprint "
                f"{encoder.fingerprint}); use the model of the index."
            )
        vectors = encoder.encode_queries(list(texts[0]))
    seconds, reason = opened.tuning.get("build_seconds"), opened.tuning.get("choice")
    if rebuild:
        choice = choose(
            len(opened), opened.dim, recall=targets.recall, memory=targets.memory, latency=targets.latency, k=targets.k
        )
        reason = choice.reason
        if choice.spec == opened.spec:
            logger.info("%s stays %s: %s", path, opened.spec, reason)
        else:
            logger.info("%s becomes %s (it was %s): %s", path, choice.spec, opened.spec, reason)
            started = time.perf_counter()
            opened = rebuild_as(opened, choice.spec)
            seconds = round(time.perf_counter() - started, 3)
    tuning = run_tuning(
        opened, targets, vectors, source=texts[1] if texts is not None else None, build_seconds=seconds, choice=reason
    )
    opened.commit()
    if as_json:
        sys.stdout.write(json.dumps({"index": str(path), "spec": opened.spec, **opened.tuning}) + "\n")
    else:
        print_tuning(opened, tuning)
    return {"index": str(path), "spec": opened.spec, **opened.tuning}


def sample_texts(
    data: str | Path | None, split: str | None, queries: str | os.PathLike[str] | None
) -> tuple[list[str], str] | None:
    """At most a sample of query texts, drawn evenly, and where they are from; None where neither is given."""
    if queries is not None and (split is not None or data is not None):
        raise ConfigError("queries for tuning come from a file or from a split of a collection; pass one of them.")
    if split is not None and data is None:
        raise ConfigError("--split is a part of a collection; pass --data too.")
    if queries is not None:
        found: Mapping[str, str] = read_queries(Path(queries))
        where = Path(queries).name
    elif data is not None:
        found = load_collection(data).queries(split)
        where = f"split {split}" if split is not None else "the collection's reported split"
    else:
        return None
    texts = list(found.values())
    step = max(1.0, len(texts) / SAMPLE)
    texts = [texts[int(place * step)] for place in range(min(len(texts), SAMPLE))]
    return texts, f"{len(texts):,} queries of {where}"


def run_tuning(
    index: VectorIndex,
    targets: Targets,
    queries: NDArray[Any] | None,
    *,
    source: str | None,
    build_seconds: float | None,
    choice: str | None,
) -> Tuning:
    """Tune with a progress bar; the index then holds the settings and the figures, to be committed."""
    with progress_bar(len(index), "vectors compared") as bar:
        tuning = tune_settings(
            index, queries=queries, recall=targets.recall, k=targets.k, latency=targets.latency, source=source,
            build_seconds=build_seconds, progress=bar.update,
        )  # fmt: skip
    if queries is None:
        logger.info(
            "no queries were given: %s stored vectors were searched, each without itself. Real queries (--tune-split "
            "or --tune-queries; --data and --split in `tune`) tell more.",
            f"{tuning.sample:,}",
        )
    index.tuning["choice"], index.tuning["memory"] = choice, targets.memory
    busy = (tuning.memory_per_vector or 0) * len(index)
    if targets.memory is not None and busy > targets.memory:
        logger.warning(
            "searches keep %s bytes busy, more than the %s allowed; `shortlist tune --rebuild` chooses a smaller kind.",
            f"{busy:,.0f}", f"{targets.memory:,}",
        )  # fmt: skip
        index.tuning["met"] = False
    if tuning.message:
        logger.warning("%s", tuning.message)
    return tuning


def print_tuning(index: VectorIndex, tuning: Tuning) -> None:
    """One table on stdout: what the index is, and what was measured."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    settings = ", ".join(f"{name} {value:g}" for name, value in _used(index, tuning).items())
    rows = {
        "index": index.spec,
        "settings": settings or "none to choose",
        f"recall@{tuning.k}": f"{tuning.recall:.4f} (target {tuning.target:g})",
        "recall@100": f"{tuning.recall_100:.4f}",
        "bytes a vector": _number(tuning.bytes_per_vector, ".1f"),
        "read by every search": _number(tuning.memory_per_vector, ".1f"),
        "build seconds": _number(tuning.build_seconds, ".1f"),
        "median ms": f"{tuning.p50_ms:.3g}",
        "95 %, 99 % ms": f"{tuning.p95_ms:.3g}, {tuning.p99_ms:.3g}",
        "queries/s": f"{tuning.queries_per_second:,.0f}",
        "measured with": f"{tuning.source}; one thread",
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(file=sys.stdout, highlight=False, markup=False).print(table)


def _used(index: VectorIndex, tuning: Tuning) -> dict[str, float]:
    """The settings that were chosen: those that this index does not have are left out."""
    record = {name: value for name, value in tuning.settings.record().items() if value is not None}
    if not getattr(index, "rescore", False):
        record.pop("fetch", None)
    return record


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
