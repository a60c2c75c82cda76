"""hnswlib and usearch for `ann.py`, in a process and an environment of their own.

    python -m venv peers && peers/bin/pip install hnswlib usearch

`Peers` starts that Python with this file and sends it one request a line as JSON; the process keeps its indexes and
answers each request when it is done, so that nothing of it runs while somebody else is timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

LIBRARIES = ("hnswlib", "usearch")


class Peers:
    """The other process; `ask` sends a request and waits for the answer."""

    def __init__(self, python: Path):
        self._process = subprocess.Popen(
            [str(python), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the peers ended at {request}; its message is above.")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Server:
    """Builds and searches; one request at a time."""

    def __init__(self) -> None:
        self.indexes: dict[str, tuple[str, Any]] = {}
        self.data: dict[str, Any] = {}

    def open(self, *, documents: str, queries: str, truth: str) -> dict[str, Any]:
        """Take a vector set; forgets the one before."""
        self.indexes = {}
        self.data = {
            "documents": np.load(documents, mmap_mode="r"), "queries": np.load(queries), "truth": np.load(truth)
        }  # fmt: skip
        return {}

    def build(self, *, name: str, library: str, links: int, effort: int, threads: int, file: str) -> dict[str, Any]:
        """Make an index, or load the one of an earlier run; gives seconds, bytes and the version."""
        documents = self.data["documents"]
        note, path = Path(file + ".json"), Path(file)
        fresh = not note.exists()
        start = time.perf_counter()
        if library == "hnswlib":
            import hnswlib

            index = hnswlib.Index("ip", documents.shape[1])
            if fresh:
                index.init_index(len(documents), M=links, ef_construction=effort)
                index.add_items(np.asarray(documents), np.arange(len(documents)), num_threads=threads)
            else:
                index.load_index(file, max_elements=len(documents))
        else:
            from usearch.index import Index

            options = {"ndim": documents.shape[1], "metric": "ip", "dtype": "f32"}
            index = Index(**options, connectivity=links, expansion_add=effort)
            if fresh:
                index.add(np.arange(len(documents)), np.asarray(documents), threads=threads)
            else:
                index.load(file)
        if fresh:
            seconds = time.perf_counter() - start
            index.save_index(file) if library == "hnswlib" else index.save(file)
            note.write_text(json.dumps({"seconds": seconds, "bytes": path.stat().st_size, "version": version(library)}))
        self.indexes[name] = (library, index)
        return dict(json.loads(note.read_text()))

    def search(
        self, *, name: str, depth: int, k: int, threads: int, first: int, count: int, recall: bool = False
    ) -> dict[str, Any]:
        """Seconds of one search, and its recall@k if asked for."""
        library, index = self.indexes[name]
        queries = self.data["queries"][first : first + count]
        start = time.perf_counter()
        if library == "hnswlib":
            index.set_ef(max(depth, k))
            found = index.knn_query(queries, k=k, num_threads=threads)[0]
        else:
            index.expansion_search = max(depth, k)
            found = index.search(queries, k, threads=threads).keys
        seconds = time.perf_counter() - start
        answer: dict[str, Any] = {"seconds": seconds}
        if recall:
            truth = self.data["truth"][first : first + count, :k]
            answer["recall"] = float(
                np.mean([np.isin(row, line).mean() for row, line in zip(truth, found, strict=True)])
            )
        return answer


def main() -> None:
    """Answer requests until the input ends."""
    server = Server()
    out = sys.stdout
    sys.stdout = sys.stderr  # what a library prints must not look like an answer
    for line in sys.stdin:
        request = json.loads(line)
        out.write(json.dumps(getattr(server, request.pop("do"))(**request)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
