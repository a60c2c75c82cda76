"""Exact search against raw faiss: from the Python call to ranked string ids, alternating in one process.

    python benchmarks/search.py [--documents 100000] [--dim 384] [--queries 1000] [--threads 2] [--output FILE.json]

The raw side is `IndexFlatIP.search` alone, which returns integer positions; ours also resolves ties, maps positions to
string ids and builds the `(id, score)` lists. The claim: the median of ours is within 10 % of the raw median.
"""

import argparse
import json
import os
import statistics
import sys
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--documents", type=int, default=100_000)
parser.add_argument("--dim", type=int, default=384)
parser.add_argument("--queries", type=int, default=1_000)
parser.add_argument("--k", type=int, nargs="+", default=[10, 100])
parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--output", help="write the figures as JSON")
arguments = parser.parse_args()
# Both sides get the same threads; the OpenMP runtimes read this when they load.
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)

import numpy as np  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(arguments.threads)
import faiss  # noqa: E402

faiss.omp_set_num_threads(arguments.threads)

from shortlist import ExactIndex, FaissIndex  # noqa: E402
from shortlist.manifest import run_manifest  # noqa: E402


def unit_vectors(generator: np.random.Generator, count: int) -> np.ndarray:
    vectors = generator.standard_normal((count, arguments.dim), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def main() -> int:
    generator = np.random.default_rng(42)
    documents = unit_vectors(generator, arguments.documents)
    queries = unit_vectors(generator, arguments.queries)
    ids = [f"document-{row}" for row in range(len(documents))]

    raw = faiss.IndexFlatIP(arguments.dim)
    raw.add(documents)
    exact = ExactIndex(arguments.dim, device="cpu")
    exact.add(ids, documents)
    flat = FaissIndex(arguments.dim, device="cpu")
    flat.add(ids, documents)

    figures = []
    for k in arguments.k:
        sides = {
            "raw faiss IndexFlatIP": lambda k=k: raw.search(queries, k),
            "ExactIndex (torch)": lambda k=k: exact.search(queries, k),
            "FaissIndex Flat": lambda k=k: flat.search(queries, k),
        }
        positions = sides["raw faiss IndexFlatIP"]()[1]
        for name in list(sides)[1:]:
            found = [[id for id, _ in row] for row in sides[name]()]
            same = sum(row == [ids[position] for position in line] for row, line in zip(found, positions, strict=True))
            # Scores within rounding of each other may change places between two ways of adding up.
            print(f"k={k}: {name} ranks {same} of {len(queries)} queries exactly as raw faiss", file=sys.stderr)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, call in sides.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        base = statistics.median(seconds["raw faiss IndexFlatIP"])
        for name, taken in seconds.items():
            median = statistics.median(taken)
            figures.append(
                {
                    "k": k,
                    "name": name,
                    "median_seconds": round(median, 4),
                    "best_seconds": round(min(taken), 4),
                    "queries_per_second": round(len(queries) / median, 1),
                    "against_raw": round(median / base, 3),
                }
            )

    print(
        f"{arguments.documents} x {arguments.dim} float32, {arguments.queries} queries, {arguments.threads} threads, "
        f"median of {arguments.rounds}"
    )
    print(f"{'k':>4} {'':<24} {'seconds':>9} {'best':>9} {'queries/s':>10} {'of raw':>7}")
    for row in figures:
        print(
            f"{row['k']:>4} {row['name']:<24} {row['median_seconds']:>9.3f} {row['best_seconds']:>9.3f} "
            f"{row['queries_per_second']:>10.0f} {row['against_raw']:>7.2f}"
        )
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as handle:
            json.dump(run_manifest(figures=figures, arguments=vars(arguments)), handle, indent=2)
            handle.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
