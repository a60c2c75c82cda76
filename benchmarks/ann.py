"""Claim: on real vectors `auto` is the fastest of our kinds at recall@10 ≥ 0.95, no peer is over 10 % faster at the
same recall, and a search from the Python call to string ids costs at most 10 % more than raw faiss with the same
parameters.

    python benchmarks/ann.py --data ROOT --work DIR --peers-python peers/bin/python --plot ann.png --output ann.json

ROOT holds the collections named in `ann_sets.py`. Vectors, indexes and each set's figures are kept in DIR: an
interrupted run goes on with the next set; delete DIR/figures-SET.json to measure again, DIR/index-SET-KIND.json to
build again. Of 2,000 queries the first half tunes `auto`, the second half is measured. Everybody else looks just deep
enough for a recall@10 of 0.90, 0.95 and 0.99 on the measured half itself. All contenders take turns, round by round;
figures are medians. Raw faiss searches the same trained index, read from our file, and scores again with IndexRefine
where ours does. hnswlib and usearch run in one other process, which waits while others are timed; theirs and raw
faiss's results are integer positions, ours at k = 10 string ids.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ann_peers import LIBRARIES, Peers
from ann_sets import QUERIES, SETS, vector_set
from common import arguments, median, report

from shortlist.files import write_json
from shortlist.indexes import build_index, open_index
from shortlist.indexes.auto import choose
from shortlist.indexes.faiss import import_faiss
from shortlist.indexes.tune import tune

KINDS = ("exact", "exact:int8", "flat", "hnsw", "ivf-flat", "sq8", "ivf-pq", "opq", "rabitq", "auto")
TARGETS = (0.9, 0.95, 0.99)
LINKS = {"million-static": (16,)}  # of the peers' graphs; the other sets try both
EFFORT = 100  # candidates while a peer's graph is built
HALF = QUERIES // 2
SECONDS = 0.4  # of one round of one contender: slow ones search fewer queries
CORES = os.cpu_count() or 1


@dataclass
class Contender:
    """Somebody who searches: `search(depth, k, threads, first, count)` gives seconds, and with `recall` that too."""

    name: str
    side: str
    search: Callable[..., dict[str, Any]]
    facts: dict[str, Any]
    most: int = 1
    depth: int = 1
    partner: str | None = None
    settled: int | None = None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the collections")
    parser.add_argument("--work", type=Path, required=True, help="where vectors, indexes and figures are kept")
    parser.add_argument("--sets", nargs="+", default=list(SETS), help="small is a quick trial")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--peers-python", type=Path, help="a Python with hnswlib and usearch; none: no peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="write recall against queries/s here as PNG")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        kept = options.work / f"figures-{name}.json"
        if not kept.exists():
            write_json(kept, {"rows": _measure_set(name, options)})
        rows += json.loads(kept.read_text())["rows"]
    report("ann", rows, options.output, cores=CORES, rounds=options.rounds, **_summary(rows))
    if options.plot:
        _plot(rows, options.plot)


def _measure_set(name: str, options: Any) -> list[dict[str, Any]]:
    documents, queries = vector_set(name, options.data, options.work)
    queries = np.array(queries)
    truth = _truth(options.work / f"{name}-truth.npy", documents, queries)
    shared = import_faiss().IndexFlatIP(documents.shape[1])  # what raw faiss scores again with
    shared.add(np.asarray(documents))
    contenders: list[Contender] = []
    for kind in options.kinds:
        contenders += _ours(kind, name, options.work, documents, queries, truth, shared)
    peers = Peers(options.peers_python) if options.peers_python else None
    try:
        if peers is not None:
            files = {side: str(options.work / f"{name}-{side}.npy") for side in ("documents", "queries", "truth")}
            peers.ask(do="open", **files)
            contenders += _theirs(peers, name, options.work, len(documents))
        return [
            {"set": name, "documents": len(documents), "dim": documents.shape[1], "target": target, **row}
            for target in TARGETS
            for row in _compete(contenders, target, options.rounds)
        ]
    finally:
        if peers is not None:
            peers.close()


def _truth(file: Path, documents: Any, queries: Any) -> Any:
    if not file.exists() or len(np.load(file, mmap_mode="r")) != len(queries):
        index = import_faiss().IndexFlatIP(documents.shape[1])
        index.add(np.asarray(documents))
        np.save(file, index.search(queries, 100)[1])
    return np.load(file)


def _ours(
    kind: str, name: str, work: Path, documents: Any, queries: Any, truth: Any, shared: Any
) -> Iterator[Contender]:
    """The index of a kind, and raw faiss with the same parameters."""
    spec = choose(*documents.shape).spec if kind == "auto" else kind
    folder = work / f"index-{name}-{kind.replace(':', '-')}"
    note = folder.with_name(folder.name + ".json")
    if not note.exists():
        _say(f"{name}: building {spec}")
        shutil.rmtree(folder, ignore_errors=True)
        blocks = ((_ids(s, min(s + 50_000, len(documents))), documents[s : s + 50_000]) for s in _starts(documents))
        start = time.perf_counter()
        build_index(folder, blocks, dim=documents.shape[1], spec=spec, count=len(documents))
        write_json(note, {"build_seconds": round(time.perf_counter() - start, 1)})
    index = open_index(folder, device="cpu")
    facts = {"spec": index.spec, "factory": getattr(index, "_built", ""), **json.loads(note.read_text())}
    facts["bytes_a_vector"] = round(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / len(documents), 1)
    rescore = getattr(index, "rescore", False)
    clusters, graph = int(getattr(index, "_clusters", 0)), "HNSW" in facts["factory"]
    if kind == "auto":
        start = time.perf_counter()
        tuned = tune(index, queries=queries[:HALF])
        facts |= {"tune_seconds": round(time.perf_counter() - start, 1), "fetch": tuned.settings.fetch}
    elif rescore:
        index.settings = replace(index.settings, fetch=20 if kind == "rabitq" else 8)

    def search(depth: int, k: int, threads: int, first: int, count: int, recall: bool = False) -> dict[str, Any]:
        _threads(threads)
        setting = {"nprobe": depth} if clusters else {"ef_search": max(depth, k)} if graph else {}
        index.settings = replace(index.settings, **setting)
        start = time.perf_counter()
        found: Any = index.search(queries[first : first + count], k) if k == 10 else None
        if found is None:
            found = index.search_arrays(queries[first : first + count], k)[0]
        seconds = time.perf_counter() - start
        if not recall:
            return {"seconds": seconds}
        if k == 10:
            found = np.array([[int(id) for id, _ in row] for row in found])
        return {"seconds": seconds, "recall": _recall(found, truth[first : first + count, :k])}

    most = clusters or (2048 if graph else 1)
    settled = (index.settings.nprobe or 1) if kind == "auto" else None
    yield Contender(kind, "ours", search, facts, most, settled=settled)

    faiss = import_faiss()
    files = sorted(folder.glob("segment-*/index.faiss"))
    base = faiss.read_index(str(files[0])) if files else shared
    raw = faiss.IndexRefine(base, shared) if rescore else base

    def raw_search(depth: int, k: int, threads: int, first: int, count: int, recall: bool = False) -> dict[str, Any]:
        _threads(threads)
        parameters = None
        if clusters:
            parameters = faiss.SearchParametersIVF(nprobe=depth)
            if isinstance(base, faiss.IndexPreTransform):
                parameters = faiss.SearchParametersPreTransform(index_params=parameters)
        elif graph:
            parameters = faiss.SearchParametersHNSW(efSearch=max(depth, k))
        if rescore:
            parameters = faiss.IndexRefineSearchParameters(k_factor=index.settings.fetch, base_index_params=parameters)
        start = time.perf_counter()
        found = raw.search(queries[first : first + count], k, params=parameters)[1]
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "recall": _recall(found, truth[first : first + count, :k]) if recall else None}

    yield Contender(f"faiss {kind}", "raw", raw_search, {"factory": facts["factory"]}, most, partner=kind)


def _theirs(peers: Peers, name: str, work: Path, count: int) -> Iterator[Contender]:
    for library in LIBRARIES:
        for links in LINKS.get(name, (16, 32)):
            label = f"{library} M={links}"
            _say(f"{name}: building {label}")
            built = peers.ask(
                do="build", name=label, library=library, links=links, effort=EFFORT, threads=CORES,
                file=str(work / f"peer-{name}-{library}-{links}"),
            )  # fmt: skip
            facts = {
                "spec": f"{library} {built['version']} M={links} ef_construction={EFFORT}",
                "build_seconds": round(built["seconds"], 1), "bytes_a_vector": round(built["bytes"] / count, 1),
            }  # fmt: skip

            def search(
                depth: int, k: int, threads: int, first: int, count: int, recall: bool = False, _name: str = label
            ) -> dict[str, Any]:
                return peers.ask(
                    do="search", name=_name, depth=depth, k=k, threads=threads, first=first, count=count, recall=recall
                )

            yield Contender(label, "peer", search, facts, 2048)


def _compete(contenders: list[Contender], target: float, rounds: int) -> list[dict[str, Any]]:
    """One row a contender, with settings that reach `target`; a kind that cannot looks as far as it can."""
    for one in contenders:
        if one.settled is not None and target == 0.95:
            one.depth = one.settled  # what tuning on the other half of the queries chose
        elif one.partner is None:
            _set_depth(one, target)
            _say(f"{target}: {one.name} looks {one.depth} of {one.most} deep")
    by_name = {one.name: one for one in contenders}
    for one in contenders:
        if one.partner is not None:
            one.depth = by_name[one.partner].depth
    cases = [(10, 1), (100, 1), (10, CORES), (100, CORES)] if target == 0.95 else [(10, 1)]
    rows = {one.name: _row(one) for one in contenders}
    for k, threads in cases:
        counts = {one.name: _count(one, k, threads) for one in contenders}
        seconds: dict[str, list[float]] = {one.name: [] for one in contenders}
        for _ in range(rounds):
            for one in contenders:
                count = counts[one.name]
                seconds[one.name].append(one.search(one.depth, k, threads, HALF, count)["seconds"] / count)
        for one in contenders:
            suffix = f"{k}" if threads == 1 else f"{k}_all"
            rows[one.name][f"qps_{suffix}"] = round(1 / median(seconds[one.name]), 1)
            if one.side == "ours":
                # Times of the same round are of the same machine: the ratio is taken round by round.
                pairs = zip(seconds[one.name], seconds[f"faiss {one.name}"], strict=True)
                rows[one.name][f"of_raw_{suffix}"] = round(median([raw / ours for ours, raw in pairs]), 3)
    return list(rows.values())


def _row(one: Contender) -> dict[str, Any]:
    found = {f"recall_{k}": round(one.search(one.depth, k, CORES, HALF, HALF, True)["recall"], 4) for k in (10, 100)}
    return {"name": one.name, "side": one.side, "depth": one.depth, **found, **one.facts}


def _set_depth(one: Contender, target: float) -> None:
    """The least depth, to within a sixteenth, at which the measured queries reach the target."""

    def reaches(depth: int) -> bool:
        return bool(one.search(depth, 10, CORES, HALF, HALF, True)["recall"] >= target)

    low, high = 0, min(8, one.most)
    while high < one.most and not reaches(high):
        low, high = high, min(2 * high, one.most)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    one.depth = high


def _count(one: Contender, k: int, threads: int) -> int:
    """As many queries as a round has time for; the first search also warms up."""
    one.search(one.depth, k, threads, HALF, 20)
    taken = one.search(one.depth, k, threads, HALF, 20)["seconds"] / 20
    return int(np.clip(SECONDS / taken, 20, HALF))


def _recall(found: Any, truth: Any) -> float:
    return float(np.mean([np.isin(row, line).mean() for row, line in zip(truth, found, strict=True)]))


def _threads(count: int) -> None:
    torch.set_num_threads(count)
    import_faiss().omp_set_num_threads(count)


def _ids(start: int, stop: int) -> list[str]:
    return [str(row) for row in range(start, stop)]


def _starts(documents: Any) -> range:
    return range(0, len(documents), 50_000)


def _say(text: str) -> None:
    import sys

    sys.stderr.write(text + "\n")


def _summary(rows: list[dict[str, Any]]) -> dict[str, str]:
    """A sentence a set: who is fastest at recall@10 ≥ 0.95."""
    sentences = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        here = [
            row
            for row in rows
            if row["set"] == name and row["target"] == 0.95 and (row["recall_10"] >= 0.95 or row["name"] == "auto")
        ]
        groups = {
            "auto": [row for row in here if row["name"] == "auto"],
            "best of our kinds": [row for row in here if row["side"] == "ours"],
            "best of raw faiss": [row for row in here if row["side"] == "raw"],
            "best peer": [row for row in here if row["side"] == "peer"],
        }
        best = {label: max(group, key=lambda row: row["qps_10"]) for label, group in groups.items() if group}
        figures = [
            f"{label}: {row['spec' if label == 'auto' else 'name']} {row['qps_10']:,.0f} ({row['recall_10']:.4f})"
            for label, row in best.items()
        ]
        sentences[name] = "at recall@10 ≥ 0.95, queries/s on one thread: " + "; ".join(figures)
    return sentences


def _plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["set"] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5.5 * len(names), 4.8), squeeze=False)
    shown = [row for row in rows if row["side"] != "raw" and row["name"] not in ("exact:int8", "flat")]
    for axis, name in zip(axes[0], names, strict=True):
        here = [row for row in shown if row["set"] == name]
        for one in dict.fromkeys(row["name"] for row in here):
            points = sorted({(row["recall_10"], row["qps_10"]) for row in here if row["name"] == one})
            if points[0][0] == 1:
                points = points[len(points) // 2 :][:1]
            peer = next(row["side"] for row in here if row["name"] == one) == "peer"
            axis.plot(
                *zip(*points, strict=True), marker="x" if peer else "o", linestyle="--" if peer else "-",
                linewidth=3 if one == "auto" else 1.2, color="black" if one == "auto" else None, label=one,
            )  # fmt: skip
        size = f"{here[0]['documents']:,} × {here[0]['dim']}"
        axis.set(title=f"{name} ({size})", xlabel="recall@10", ylabel="queries/s, one thread", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
