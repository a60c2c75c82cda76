"""Five losses over the full label set, from one start, beside neighbours, a one-vs-all head and BM25.

    python benchmarks/dexml_losses.py --data DIR --work DIR [--methods NAME ...] [--seeds 1 2 3] [--output FILE]

DIR of --data is an extreme-classification folder with label texts (made for yso-titles: 134,967 titles, 20,687 labels).
Every trained row has the same start (a tower for titles and one for labels, each with the embedded encoder's weights),
batch, schedule and epochs; only loss, learning rate and temperature differ. These two are chosen for each loss among
four points, by nDCG@5 on 5,000 titles held out of train, one seed, one epoch on 40,000 titles; then each seed trains on
all of train and is measured once on test, with the last weights.

--work keeps every finished run's figures under a hash of its settings, so a benchmark that was stopped goes on where it
was: repeat the command. --limit N cuts train, tuning and test down to N titles each, to try the script itself.

Time on two quiet cores with the embedded encoder (256 numbers): 0.5 to 0.7 s a step of 1,024 titles, so about 4 minutes
a run of three epochs and half a minute a tuning run: half an hour for each two rows of three seeds. A thread less than
there are free cores is faster than one more: set OMP_NUM_THREADS=1 on a machine that is busy.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import common
import numpy as np
import scipy.sparse

from shortlist import DualEncoder, ExactIndex, Retriever, evaluate, load_collection
from shortlist.commands.train import train
from shortlist.config import dump_config, load_config
from shortlist.data import Collection
from shortlist.files import atomic_directory, write_json
from shortlist.metrics import count_labels
from shortlist.retrieval import LexicalRetriever
from shortlist.retrieval.analysis import Analyzer
from shortlist.types import Run

MEASURES = ["P@1", "P@3", "P@5", "PSP@1", "PSP@5", "nDCG@5", "R@10", "R@100"]
SELECTION = "nDCG@5"
TUNING_TITLES, HELD_OUT_TITLES, NEIGHBOURS = 40_000, 5_000, 20


@dataclass(frozen=True)
class Method:
    """One trained row: its settings, and the four points its learning rate and temperature are chosen from."""

    settings: tuple[str, ...]
    learning_rates: Sequence[float]
    temperatures: Sequence[float]
    head: bool = False

    def points(self) -> list[list[str]]:
        """The settings of each point of the grid."""
        rate = "training.head_learning_rate" if self.head else "training.learning_rate"
        return [
            [f"{rate}={learning_rate}", f"training.temperature={temperature}"]
            for learning_rate in self.learning_rates
            for temperature in self.temperatures
        ]


METHODS: dict[str, Method] = {
    "InfoNCE": Method(("loss=info_nce",), (5e-3, 1e-2), (0.05, 0.08)),
    "DecoupledSoftmax": Method(("loss=decoupled_softmax",), (5e-3, 1e-2), (0.05, 0.08)),
    # The sharpness of soft top-k is 2, so twice the temperature gives the same logits.
    "SoftTop-5": Method(("loss={name: soft_top_k, k: 5}",), (5e-3, 1e-2), (0.1, 0.16)),
    "SoftTop-100": Method(("loss={name: soft_top_k, k: 100}",), (5e-3, 1e-2), (0.1, 0.16)),
    "BCE": Method(("loss=one_vs_all_bce",), (5e-3, 1e-2), (0.02, 0.05)),
    # The baseline that users of extreme classification know: a vector and a bias a label in place of its text.
    "one-vs-all head": Method(
        ("loss=one_vs_all_bce", "model.document_side=vectors", "training.learning_rate=0.005"),
        (1e-2, 3e-2), (0.05, 0.1), head=True,
    ),
    # Not a loss: the encoder of the others and a free vector a label beside its text.
    "DecoupledSoftmax, text and vectors": Method(
        ("loss=decoupled_softmax", "model.document_side=text_and_vectors", "training.learning_rate=0.005"),
        (5e-3, 1e-2), (0.05, 0.08), head=True,
    ),
}  # fmt: skip
BASELINES = ("untrained", "TF-IDF 20-NN", "BM25")


@dataclass
class Benchmark:
    """The collection, the cut-down copy that tuning runs on, and the folder of finished figures."""

    collection: Collection
    tuning: Path
    work: Path
    base: list[str]
    grids: dict[str, dict[str, float]] = field(default_factory=dict)

    def kept(self, name: str, settings: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Figures of one run: read if the same settings were run before, else computed and written."""
        key = hashlib.sha256(json.dumps([name, settings, self.collection.checksums()]).encode()).hexdigest()
        path = self.work / f"{name.replace(' ', '-')}-{key[:16]}.json"
        if path.is_file():
            return dict(json.loads(path.read_text(encoding="utf-8")))
        start = time.perf_counter()
        figures = {"name": name, **compute()}
        figures.setdefault("seconds", round(time.perf_counter() - start, 1))
        write_json(path, {**figures, "settings": settings})
        sys.stderr.write(f"{name}: {_brief(figures)}\n")
        return figures

    def trained(self, name: str, data: str | Path, settings: Sequence[str]) -> dict[str, Any]:
        """Train once, keep the last weights, and measure on the test split of `data`."""
        # Nothing is evaluated or chosen during a run: no part of train is held out, and all rows take the last step.
        config = load_config("xc-static", [*self.base, *settings, "data.dev=none", "training.save_total_limit=1"])

        def compute() -> dict[str, Any]:
            collection = self.collection if str(data) == str(self.collection.path) else load_collection(data)
            with tempfile.TemporaryDirectory(dir=self.work, prefix="run-") as folder:
                output = Path(folder) / "model"
                start = time.perf_counter()
                result = train(config, overrides=[f"data.path={data}"], output=output)
                seconds = time.perf_counter() - start
                run = search(str(output), collection)
            steps = getattr(result, "steps", 0)
            figures = {**measures(collection, run), "steps": steps, "seconds": round(seconds, 1)}
            sys.stderr.write(f"{' '.join(settings)}: {seconds / max(1, steps):.2f} s a step\n")
            return figures

        return self.kept(name, dump_config(config), compute)

    def tuned(self, name: str, method: Method) -> list[str]:
        """The settings of the best of the method's four points, on titles held out of train."""
        values = {}
        for point in method.points():
            settings = [*method.settings, *point, "training.num_train_epochs=1", "seed=1"]
            figures = self.trained(f"{name} (tuning)", self.tuning, settings)
            values[tuple(point)] = figures[SELECTION]
        best = max(values, key=lambda point: values[point])
        self.grids[name] = {" ".join(point): round(100 * value, 2) for point, value in values.items()}
        return list(best)


def search(model: str, collection: Collection) -> Run:
    """The best 100 labels of each test title, by exact search."""
    encoder = DualEncoder.from_pretrained(model)
    retriever = Retriever(encoder, ExactIndex.build(encoder, collection.corpus))
    return retriever.search(collection.queries("test"), k=100)


def measures(collection: Collection, run: Run) -> dict[str, float]:
    """MEASURES of a run on test, 0–1."""
    train_labels = collection.qrels("train")
    options: dict[str, Any] = {"train_counts": count_labels(train_labels), "num_train": len(train_labels)}
    if collection.propensity:
        options["propensity"] = collection.propensity
    return dict(
        evaluate(collection.qrels("test"), run, MEASURES, filters=collection.filters("test") or None, **options).mean
    )


def neighbours(collection: Collection, *, count: int = NEIGHBOURS) -> Run:
    """TF-IDF nearest neighbours: labels of the `count` most similar training titles, weighed by the similarity.

    Words of two letters or more without English stop words, sublinear term frequency, smoothed inverse document
    frequency, cosine; a label's score is the sum over the neighbours that have it.
    """
    train_texts, test_texts = collection.queries("train"), collection.queries("test")
    analyzer = Analyzer(stemmer=None, stopwords="en")
    vocabulary: dict[str, int] = {}
    train_counts = _term_counts([analyzer(text) for text in train_texts.values()], vocabulary, grow=True)
    test_counts = _term_counts([analyzer(text) for text in test_texts.values()], vocabulary, grow=False)
    frequency = np.bincount(train_counts.indices, minlength=train_counts.shape[1])
    inverse = np.log((1 + train_counts.shape[0]) / (1 + frequency)) + 1
    titles = _unit_rows(train_counts, inverse)
    queries = _unit_rows(test_counts, inverse)
    judged = collection.qrels("train")
    labels = {label: column for column, label in enumerate(collection.corpus.ids)}
    ids = list(collection.corpus.ids)
    pairs = [(row, labels[label]) for row, title in enumerate(train_texts) for label in judged.relevant(title)]
    rows, columns = np.array(pairs, np.int64).T
    relevance = scipy.sparse.csr_matrix(
        (np.ones(len(pairs), np.float32), (rows, columns)), (len(train_texts), len(ids))
    )
    run = Run(name="TF-IDF")
    names, transposed = list(test_texts), titles.T.tocsr()
    for start in range(0, len(names), 256):
        similarity = (queries[start : start + 256] @ transposed).tocsr()
        scores = _best_entries(similarity, count) @ relevance
        for row, name in enumerate(names[start : start + 256]):
            span = slice(scores.indptr[row], scores.indptr[row + 1])
            best = np.argsort(-scores.data[span], kind="stable")[:100]
            run.add(name, [ids[column] for column in scores.indices[span][best]], scores.data[span][best])
    return run


def _term_counts(texts: Sequence[list[str]], vocabulary: dict[str, int], *, grow: bool) -> scipy.sparse.csr_matrix:
    """Term counts `(texts, terms)`; unknown terms join the vocabulary or are left out."""
    columns: list[int] = []
    bounds = [0]
    for terms in texts:
        if grow:
            columns.extend(vocabulary.setdefault(term, len(vocabulary)) for term in terms)
        else:
            columns.extend(vocabulary[term] for term in terms if term in vocabulary)
        bounds.append(len(columns))
    shape = (len(texts), len(vocabulary))
    ones = np.ones(len(columns), np.float32)
    matrix = scipy.sparse.csr_matrix((ones, np.array(columns, np.int64), np.array(bounds)), shape)
    matrix.sum_duplicates()
    return matrix


def _unit_rows(counts: scipy.sparse.csr_matrix, inverse: np.ndarray) -> scipy.sparse.csr_matrix:
    """(1 + log tf) · idf, each row of length 1."""
    matrix = counts.copy()
    matrix.data = ((1 + np.log(matrix.data)) * inverse[matrix.indices]).astype(np.float32)
    length = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    return (scipy.sparse.diags(1 / np.maximum(length, 1e-12)).astype(np.float32) @ matrix).tocsr()


def _best_entries(matrix: scipy.sparse.csr_matrix, count: int) -> scipy.sparse.csr_matrix:
    """The `count` largest entries of each row."""
    data, indices, bounds = [], [], [0]
    for row in range(matrix.shape[0]):
        span = slice(matrix.indptr[row], matrix.indptr[row + 1])
        values = matrix.data[span]
        best = np.argpartition(-values, count - 1)[:count] if len(values) > count else np.arange(len(values))
        data.append(values[best])
        indices.append(matrix.indices[span][best])
        bounds.append(bounds[-1] + len(best))
    return scipy.sparse.csr_matrix((np.concatenate(data), np.concatenate(indices), bounds), matrix.shape)


def bm25(collection: Collection) -> Run:
    """BM25 of the label texts for each test title."""
    return LexicalRetriever.build(collection.corpus).search(collection.queries("test"), 100)


# The cut-down copies ------------------------------------------------------------------------------------


def cut(source: Path, target: Path, *, titles: int, held_out: int, test: int | None) -> Path:
    """Write an XC folder of `titles` training titles; `held_out` others, or `test` of the test titles, are its test."""
    if target.is_dir():
        return target
    lines = list(_lines(source / "trn.json.gz"))
    order = np.random.default_rng(0).permutation(len(lines)).tolist()
    chosen = [lines[row] for row in order[:titles]]
    tested = [lines[row] for row in order[titles : titles + held_out]]
    if test is not None:
        tested = list(_lines(source / "tst.json.gz"))[:test]
    with atomic_directory(target) as folder:
        for name, content in (("trn", chosen), ("tst", tested), ("lbl", _lines(source / "lbl.json.gz"))):
            with gzip.open(folder / f"{name}.json.gz", "wt", encoding="utf-8", compresslevel=1) as handle:
                handle.writelines(content)
    return target


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as handle:
        yield from handle


# The table ----------------------------------------------------------------------------------------------


def row(name: str, runs: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """Mean ± standard deviation over the seeds, in per cent."""
    cells: dict[str, Any] = {"method": name}
    for measure in MEASURES:
        values = [100 * run[measure] for run in runs]
        spread = f" ±{statistics.stdev(values):.2f}" if len(values) > 1 else ""
        cells[measure] = f"{statistics.mean(values):.2f}{spread}"
    return {**cells, "train s": statistics.median(run.get("seconds", 0.0) for run in runs), **extra}


def _brief(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {100 * figures[name]:.2f}" for name in MEASURES) + f" ({figures['seconds']:.0f} s)"


def options() -> argparse.Namespace:
    """The command line."""
    parser = common.arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="XC folder: trn.json.gz, tst.json.gz, lbl.json.gz")
    parser.add_argument("--work", type=Path, required=True, help="folder of finished figures, made if it is not there")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *BASELINES], default=[*BASELINES, *METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--start", default="shortlist/static-en", help="the encoder every run starts from")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--limit", type=int, help="cut train, tuning and test to N titles each")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every run")
    return parser.parse_args()


def main() -> None:
    """Run what is not done yet, then print the table."""
    given = options()
    given.work.mkdir(parents=True, exist_ok=True)
    for left in given.work.glob("run-*"):  # of a run that was killed
        shutil.rmtree(left)
    source, name, titles, held_out = given.data, "tuning", TUNING_TITLES, HELD_OUT_TITLES
    if given.limit:
        source = cut(given.data, given.work / f"data-{given.limit}", titles=given.limit, held_out=0, test=given.limit)
        name, titles, held_out = f"tuning-{given.limit}", given.limit // 2, given.limit // 4
    tuning = cut(source, given.work / name, titles=titles, held_out=held_out, test=None)
    base = [f"model.path={given.start}", "model.shared=false", f"training.batch_size={given.batch_size}", *given.set]
    benchmark = Benchmark(load_collection(source), tuning, given.work, base)
    collection = benchmark.collection
    baselines: dict[str, Callable[[], Run]] = {
        "untrained": lambda: search(given.start, collection),
        "TF-IDF 20-NN": lambda: neighbours(collection),
        "BM25": lambda: bm25(collection),
    }
    rows = []
    for name in given.methods:
        if name in baselines:
            settings = given.start if name == "untrained" else ""
            compute = baselines[name]
            rows.append(row(name, [benchmark.kept(name, settings, lambda: measures(collection, compute()))]))  # noqa: B023
            continue
        method = METHODS[name]
        point = benchmark.tuned(name, method)
        epochs = f"training.num_train_epochs={given.epochs:g}"
        runs = [
            benchmark.trained(name, str(collection.path), [*method.settings, *point, epochs, f"seed={seed}"])
            for seed in given.seeds
        ]
        rows.append(row(name, runs, settings=" ".join(value.removeprefix("training.") for value in point)))
    common.report(
        "dexml_losses", rows, given.output, data=collection.name, checksums=collection.checksums(), seeds=given.seeds,
        epochs=given.epochs, settings=base, selection=SELECTION,
        tuning=benchmark.grids,
    )  # fmt: skip


if __name__ == "__main__":
    main()
