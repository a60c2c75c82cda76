"""`shortlist demo`: the main job from start to end on one collection, with what each step gave and took."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from shortlist.commands.index import index as build
from shortlist.commands.train import train
from shortlist.data import Collection, load_collection, write_run
from shortlist.errors import MissingInputError
from shortlist.files import refuse_existing, write_json
from shortlist.indexes import open_index
from shortlist.manifest import run_manifest
from shortlist.metrics import evaluate
from shortlist.retrieval import DualEncoder, LexicalRetriever, Retriever
from shortlist.types import Run

logger = logging.getLogger(__name__)

MEASURES = ["nDCG@10", "R@100"]
T = TypeVar("T")


@dataclass(frozen=True)
class DemoRow:
    """One system: its measures, queries a second, index size, and the seconds of its steps.

    `unseen` is the first measure over the queries none of whose relevant documents a training query has.
    """

    system: str
    measures: dict[str, float]
    unseen: float | None
    queries_per_second: float
    index_bytes: int
    train_seconds: float | None
    index_seconds: float
    search_seconds: float


def demo(
    *,
    output: Path | None = None,
    data: str = "scifact",
    model: str = "shortlist/static-en",
    config: str = "scifact-dual-encoder",
    as_json: bool = False,
    overwrite: bool = False,
) -> list[DemoRow]:
    """Run BM25, the encoder as it is and the encoder after training on `data`; print one table.

    Trains on the train split, reports on the default split (test). With `output`, model, indexes, runs and the
    figures stay there.

    Raises:
        MissingInputError: the collection has no train split, or nothing to report on.
        OutputExistsError: `output` is there and `overwrite` is false.
    """
    if output is not None:
        refuse_existing(output, overwrite=overwrite)
    collection = load_collection(data)
    split = collection.default_split
    if "train" not in collection.splits or split == "train":
        raise MissingInputError(
            f"the demo trains on the split train and reports on another; {collection.name} has "
            f"{', '.join(collection.splits) or 'no splits'}."
        )
    if output is None:
        with tempfile.TemporaryDirectory(prefix="shortlist-demo-") as folder:
            rows = _run(collection, data, split, Path(folder), model, config)
    else:
        output.mkdir(parents=True, exist_ok=True)
        rows = _run(collection, data, split, output, model, config)
        facts = {"data": data, "split": split, "model": model, "config": config}
        write_json(output / "demo.json", run_manifest(**facts, rows=[asdict(row) for row in rows]))
    if as_json:
        sys.stdout.write(json.dumps({"data": data, "split": split, "rows": [asdict(row) for row in rows]}) + "\n")
    else:
        _print(rows, collection, split, output)
    return rows


def _run(collection: Collection, data: str, split: str, folder: Path, model: str, config: str) -> list[DemoRow]:
    """The three rows, best read in order; everything is written under `folder`."""
    queries = collection.queries(split)
    rows = [_lexical(collection, queries, split, folder)]
    rows.append(_dense("encoder as it is", collection, data, split, folder, model, name="untrained"))

    logger.info("Training on the train split of %s", collection.name)
    overrides = [f"data.path={json.dumps(data)}", f"model.path={json.dumps(model)}"]
    trained = folder / "model"
    _, seconds = _timed(lambda: train(config, overrides=overrides, output=trained, overwrite=True))
    rows.append(
        _dense("encoder, trained", collection, data, split, folder, str(trained), name="trained", train_seconds=seconds)
    )
    return rows


def _lexical(collection: Collection, queries: Any, split: str, folder: Path) -> DemoRow:
    logger.info("BM25")
    retriever, index_seconds = _timed(lambda: LexicalRetriever.build(collection.corpus))
    retriever.save(folder / "bm25-index", overwrite=True)
    run, search_seconds = _timed(
        lambda: retriever.search(queries, 100, exclude_self=collection.exclude_self, name="bm25")
    )
    return _row("BM25", collection, split, folder, run, "bm25", index_seconds, search_seconds)


def _dense(
    system: str,
    collection: Collection,
    data: str,
    split: str,
    folder: Path,
    model: str,
    *,
    name: str,
    train_seconds: float | None = None,
) -> DemoRow:
    logger.info("Indexing and searching with %s", model)
    index_path = folder / f"{name}-index"
    _, index_seconds = _timed(lambda: build(model=model, data=data, output=index_path, overwrite=True))
    retriever = Retriever(DualEncoder.from_pretrained(model), open_index(index_path))
    run, search_seconds = _timed(
        lambda: retriever.search(collection.queries(split), 100, exclude_self=collection.exclude_self, name=name)
    )
    return _row(system, collection, split, folder, run, name, index_seconds, search_seconds, train_seconds)


def _row(
    system: str,
    collection: Collection,
    split: str,
    folder: Path,
    run: Run,
    name: str,
    index_seconds: float,
    search_seconds: float,
    train_seconds: float | None = None,
) -> DemoRow:
    write_run(run, folder / f"{name}.run.gz")
    result = evaluate(collection.qrels(split), run, MEASURES)
    unseen = [result.per_query[query][MEASURES[0]] for query in unseen_queries(collection, split)]
    size = sum(file.stat().st_size for file in (folder / f"{name}-index").rglob("*") if file.is_file())
    return DemoRow(
        system=system,
        measures={measure: round(result.mean[measure], 4) for measure in MEASURES},
        unseen=round(sum(unseen) / len(unseen), 4) if unseen else None,
        queries_per_second=round(len(collection.queries(split)) / search_seconds, 1),
        index_bytes=size,
        train_seconds=None if train_seconds is None else round(train_seconds, 2),
        index_seconds=round(index_seconds, 2),
        search_seconds=round(search_seconds, 2),
    )


def unseen_queries(collection: Collection, split: str) -> list[str]:
    """Queries of `split` none of whose relevant documents is relevant to a query of the train split."""
    train, qrels = collection.qrels("train"), collection.qrels(split)
    seen = {document for query in train for document in train.relevant(query)}
    return [query for query in qrels if seen.isdisjoint(qrels.relevant(query))]


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


def _print(rows: list[DemoRow], collection: Collection, split: str, output: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{collection.name}, {split} split", title_justify="left")
    for column in ("system", *MEASURES, "queries/s", "index bytes", "train s", "index s", "search s"):
        table.add_column(column, justify="left" if column == "system" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.system,
            *(f"{row.measures[measure]:.4f}" for measure in MEASURES),
            f"{row.queries_per_second:,.0f}",
            f"{row.index_bytes:,}",
            "" if row.train_seconds is None else f"{row.train_seconds:.1f}",
            f"{row.index_seconds:.1f}",
            f"{row.search_seconds:.2f}",
        )
    console = Console()
    # A pipe has no width; a cut column would lose a figure.
    console.width = max(console.width, 110)
    console.print(table)
    unseen, total = len(unseen_queries(collection, split)), len(collection.qrels(split))
    if 0 < unseen < total:
        figures = ", ".join(f"{row.system} {row.unseen:.4f}" for row in rows)
        console.print(
            f"{total - unseen} of the {total} queries have a relevant document that a training query has too. "
            f"{MEASURES[0]} over the other {unseen}: {figures}.",
            soft_wrap=True,
        )
    if output is not None:
        console.print(f"Model, indexes and runs are in {output}.", soft_wrap=True)
    sys.stdout.write(NEXT_STEPS)


NEXT_STEPS = """
The same on your own data (DIR: a BEIR folder, MS MARCO files, JSON lines, ...):

  shortlist data info DIR
  shortlist train scifact-dual-encoder data.path=DIR -o OUT
  shortlist index  --model OUT --data DIR -o IDX
  shortlist search --index IDX --data DIR --split test -k 100 -o out.run.gz
  shortlist search --bm25 --data DIR --split test -k 100 -o bm25.run.gz
  shortlist evaluate --data DIR --split test out.run.gz bm25.run.gz
"""
