"""Claims for an index of a million vectors: it opens in under a second; a thousand documents are added durably in under
a second, and a thousand removed; and a memory-mapped search grows the process by under a fifth of the vectors' size.

    python benchmarks/index_lifecycle.py [--vectors FILE.npy] [--documents 1000000] [--index exact flat ...]

Each kind is built once from a stream of blocks; every step then runs in a process of its own, so that nothing is warm
but the file cache. Durable means: files flushed, manifest replaced, and a second process finds the documents. RssAnon
is read after the imports and again after the searches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import anonymous_mib, arguments, report

from shortlist.indexes import build_index, open_index
from shortlist.indexes.faiss import import_faiss

DIM, BLOCK, CHANGED = 256, 65_536, 1_000


def clustered(documents: int, *, seed: int = 0) -> Iterator[np.ndarray]:
    """Unit vectors around 4,096 centres, in blocks: harder than clusters apart, easier than uniform noise."""
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((4096, DIM), dtype=np.float32)
    for start in range(0, documents, BLOCK):
        count = min(BLOCK, documents - start)
        block = centres[generator.integers(len(centres), size=count)]
        block += generator.standard_normal((count, DIM), dtype=np.float32)
        yield block / np.linalg.norm(block, axis=1, keepdims=True)


def blocks(vectors: Path | None, documents: int) -> Iterator[tuple[list[str], np.ndarray]]:
    if vectors is None:
        stream = clustered(documents)
    else:
        stored = np.load(vectors, mmap_mode="r")[:documents]
        stream = (np.asarray(stored[start : start + BLOCK]) for start in range(0, len(stored), BLOCK))
    offset = 0
    for block in stream:
        yield [f"document-{offset + row}" for row in range(len(block))], block
        offset += len(block)


def queries(vectors: Path | None) -> np.ndarray:
    stored = next(clustered(BLOCK, seed=1)) if vectors is None else np.load(vectors, mmap_mode="r")[-1000:]
    return np.ascontiguousarray(stored[:1000], np.float32)


def child(step: str, path: Path, vectors: Path | None) -> dict[str, Any]:
    """One step in this process, after everything is imported."""
    import_faiss()
    asked = queries(vectors)
    base = anonymous_mib()
    start = time.perf_counter()
    index = open_index(path, device="cpu")
    opened = time.perf_counter() - start
    if step == "search":
        grown = 0.0
        for row in range(0, len(asked), 100):
            assert all(len(found) == 10 for found in index.search(asked[row : row + 100], 10))
            grown = max(grown, anonymous_mib() - base)
        return {"open s": opened, "RssAnon growth MiB": grown}
    new = [f"added-{row}" for row in range(CHANGED)]
    start = time.perf_counter()
    if step == "add":
        index.add(new, asked[:CHANGED])
    elif step == "remove":
        index.remove([f"document-{row * 7}" for row in range(CHANGED)])
    index.commit()
    seconds = time.perf_counter() - start
    return {f"{step} {CHANGED} s": seconds, "count": len(index)}


def run(step: str, path: Path, vectors: Path | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", step, str(path), str(vectors or "")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        step, path, vectors = sys.argv[2:5]
        sys.stdout.write(json.dumps(child(step, Path(path), Path(vectors) if vectors else None)) + "\n")
        return
    parser = arguments(__doc__)
    parser.add_argument("--vectors", type=Path, help="float32 .npy to use instead of made vectors")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--index", nargs="+", default=["exact", "exact:int8", "flat", "sq8", "ivf-pq"])
    parser.add_argument("--work", type=Path, help="folder for the indexes [default: a temporary one]")
    options = parser.parse_args()
    dim = DIM if options.vectors is None else np.load(options.vectors, mmap_mode="r").shape[1]
    os.environ.setdefault("SHORTLIST_QUIET", "1")
    rows = []
    for spec in options.index:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            path = Path(folder) / "index"
            start = time.perf_counter()
            count = build_index(path, blocks(options.vectors, options.documents), dim=dim, spec=spec)
            row: dict[str, Any] = {"index": spec, "documents": count, "build s": time.perf_counter() - start}
            row |= run("search", path, options.vectors)
            row["of the vectors %"] = 100 * row["RssAnon growth MiB"] / (count * dim * 4 / 2**20)
            for step, expected in [("add", count + CHANGED), ("remove", count)]:
                changed = run(step, path, options.vectors)
                assert changed.pop("count") == expected
                row |= changed
            row["open after s"] = run("search", path, options.vectors)["open s"]
            start = time.perf_counter()
            index = open_index(path, device="cpu")
            index.compact()
            index.commit()
            row["compact s"] = time.perf_counter() - start
            row["bytes a vector"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / count
            rows.append(row)
            sys.stderr.write(f"{row}\n")
    report("index_lifecycle", rows, options.output)


if __name__ == "__main__":
    main()
