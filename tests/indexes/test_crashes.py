"""A killed writer leaves the old index or the new one; readers beside a writer see one generation, whole."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from shortlist import open_index
from shortlist.indexes import build_index, verify

SCRIPT = Path(__file__).with_name("crash_writers.py")


def kills(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_writers_killed_while_they_change_an_index_leave_it_whole(tmp_path):
    counts = kills(tmp_path, "exact", "6", "0")
    assert counts["old"] + counts["new"] == 6 and counts["announced"] >= 6


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "number"), [("exact", "100"), ("IVF4,PQ2x4fs+rescore", "60")])
def test_writers_killed_at_random_moments_leave_it_whole(spec, number, tmp_path):
    counts = kills(tmp_path, spec, number, "1")
    assert counts["old"] + counts["new"] == int(number)
    # Most were in the middle of something.
    assert counts["old"] >= int(number) // 10 and counts["leftovers"] >= int(number) // 10


@pytest.mark.slow
def test_builds_killed_at_random_moments_leave_nothing_or_all(tmp_path):
    counts = kills(tmp_path, "flat", "40", "2", "build")
    assert counts["absent"] + counts["complete"] == 40 and counts["absent"] >= 4


READER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_crashes import read
path, stop = Path(sys.argv[1]), Path(sys.argv[1] + ".stop")
seen = read(path)
Path(sys.argv[1] + ".ready").touch()
while not stop.exists():
    seen |= read(path)
print(sorted(seen))
"""
SIZE = 60


def arrays(version):
    return [f"d{row}" for row in range(SIZE)], np.full((SIZE, 4), version, np.float32)


def documents(version):
    return [{"id": f"d{row}", "text": "", "metadata": {"version": version}} for row in range(SIZE)]


def read(path):
    """The version of the index at `path`, after checking that nothing in it is of another one."""
    index = open_index(path, device="cpu")
    blocks = list(index.blocks(size=17))
    versions = {value for block in blocks for value in np.unique(block.vectors).tolist()}
    told = {index.document(id)["metadata"]["version"] for block in blocks for id in block.ids}
    assert len(index) == SIZE == sum(len(block.ids) for block in blocks)
    assert len(versions) == 1 and told == versions, (versions, told)
    (version,) = versions
    (found,) = index.search(np.ones((1, 4), np.float32), SIZE + 5, f"version == {int(version)}")
    assert len(found) == SIZE and {score for _, score in found} == {4 * version}
    return versions


@pytest.mark.parametrize("spec", ["exact", pytest.param("flat", marks=pytest.mark.slow)])
def test_readers_beside_a_writer_see_whole_generations(spec, tmp_path):
    path = tmp_path / "index"
    build_index(path, [arrays(0)], dim=4, spec=spec)
    index = open_index(path, device="cpu")
    index.add(*arrays(0), replace=True, documents=documents(0))
    index.commit()
    early = open_index(path, device="cpu")
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(path), str(SCRIPT.parent)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    done, seen, errors = threading.Event(), [], []

    def reader():
        try:
            while not done.is_set():
                seen.append(read(path))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        version = 0
        # The other process takes its time to begin.
        while version < 30 or not (path.with_name("index.ready").exists() or process.poll() is not None):
            version += 1
            index.add(*arrays(version), replace=True, documents=documents(version))
            if version % 4 == 0:
                index.compact()
            if version % 10 == 0:
                index.save(path, overwrite=True)
            else:
                index.commit()
        for _ in range(5):
            version += 1
            index.add(*arrays(version), replace=True, documents=documents(version))
            index.commit()
    finally:
        done.set()
        path.with_name("index.stop").touch()
        for thread in threads:
            thread.join()
        output, error = process.communicate()
    assert not errors and process.returncode == 0, (errors, error)
    assert seen and json.loads(output) and read(path) == {float(version)}
    verify(path)
    # Who opened it before has what was there then.
    assert {value for block in early.blocks() for value in np.unique(block.vectors).tolist()} == {0.0}
    assert early.document("d3")["metadata"] == {"version": 0}
