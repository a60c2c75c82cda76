"""Kills writers of an index at random moments, and looks at what they left.

`python crash_writers.py FOLDER SPEC KILLS SEED [build]` prints what happened as JSON. One process that has imported
everything forks a writer for each kill. The writer announces each generation before it commits it; after the kill the
index must be the last that was announced or the one before.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from shortlist.errors import DataError, MissingInputError
from shortlist.indexes import build_index, open_index, verify

DIM = 4


def vector(value):
    return [value, 1, value % 7, -value]


def arrays(state):
    ids = list(state)
    return ids, np.array([vector(state[id]) for id in ids], np.float32).reshape(len(ids), DIM)


def documents(state):
    return [{"id": id, "title": "", "text": "", "metadata": {"value": value}} for id, value in state.items()]


class Record:
    def __init__(self, id, value):
        self.id, self.title, self.text, self.metadata = id, "", "", {"value": value}


def build(path, spec, state, overwrite):
    records = [Record(id, value) for id, value in state.items()]
    build_index(path, [arrays(state)], dim=DIM, spec=spec, documents=records, overwrite=overwrite)


def content(path):
    """Ids and values of an index, after checking that vectors and documents tell the same."""
    verify(path)
    index = open_index(path, device="cpu")
    state = {}
    for block in index.blocks():
        for id, found, position in zip(block.ids, block.vectors.tolist(), block.positions.tolist(), strict=True):
            value = index.documents.get(position)["metadata"]["value"]
            assert found == vector(value), (id, found, value)
            assert index.documents.get(position)["id"] == id
            state[id] = value
    assert len(index) == len(state)
    return state


def write_for_ever(path, spec, state, seed, announce):
    """Change the index by one random operation after another, announcing what it will be."""
    generator = random.Random(seed)
    index = open_index(path, device="cpu")
    while True:
        drawn = generator.random()
        if drawn < 0.25:
            state = {f"d{number}": generator.randrange(1000) for number in range(generator.randrange(150, 300))}
            announce(state)
            build(path, spec, state, overwrite=True)
            index = open_index(path, device="cpu")
            continue
        new = {f"d{generator.randrange(400)}": generator.randrange(1000) for _ in range(generator.randrange(1, 20))}
        gone = generator.sample(sorted(state), min(len(state) - 1, generator.randrange(10)))
        state = {**{id: value for id, value in state.items() if id not in gone}, **new}
        index.remove(gone)
        ids, matrix = arrays(new)
        index.add(ids, matrix, replace=True, documents=documents(new))
        announce(state)
        if drawn < 0.45:
            index.compact()
        if drawn > 0.9:
            index.save(path, overwrite=True)
        else:
            index.commit()


def forked(work, most=1):
    """Run `work(announce)` in a child, kill it a while after one of its announcements, and return all of them."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)

        def announce(state):
            line = json.dumps(state).encode() + b"\n"
            while line:
                line = line[os.write(writer, line) :]

        try:
            work(announce)
        finally:
            os._exit(3)
    os.close(writer)
    lines, received = [], b""
    deadline, wanted = None, random.randrange(1, most + 1)
    while True:
        if deadline is None and received.count(b"\n") >= wanted:
            deadline = time.monotonic() + random.random() * 0.05
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
            os.set_blocking(reader, True)
        try:
            os.set_blocking(reader, deadline == float("inf"))
            part = os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.0005)
            continue
        if not part:
            break
        received += part
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise AssertionError(f"a writer ended by itself with status {status}")
    lines = received.split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def kill_changes(folder, spec, kills, seed):
    """Kill writers that change an index."""
    path = folder / "index"
    state = {f"d{number}": number for number in range(200)}
    build(path, spec, state, overwrite=False)
    counts = {"old": 0, "new": 0, "announced": 0, "leftovers": 0}
    for number in range(kills):
        work = partial(write_for_ever, path, spec, dict(state), f"{seed}-{number}")
        announced = forked(work, most=4)
        before, after = [state, *announced][-2:]
        found = content(path)
        assert found in (before, after), (number, len(found), len(before), len(after))
        counts["old" if found == before else "new"] += 1
        counts["announced"] += len(announced)
        named = json.loads((path / "manifest.json").read_text())
        known = {"manifest.json", *(name.partition("/")[0] for name in named["files"])}
        counts["leftovers"] += any(entry.name not in known for entry in path.iterdir())
        state = found
    return counts


def kill_builds(folder, spec, kills, seed):
    """Kill writers that build an index where there was none."""
    counts = {"absent": 0, "complete": 0}
    for number in range(kills):
        path = folder / f"fresh {number}"
        state = {f"d{row}": row + number for row in range(300)}

        def work(say, path=path, state=state):
            say(state)
            build(path, spec, state, overwrite=False)
            time.sleep(60)

        forked(work)
        try:
            assert content(path) == state
            counts["complete"] += 1
        except (DataError, MissingInputError) as error:
            assert "not an index" in str(error) or "no index at" in str(error), error
            counts["absent"] += 1
            build(path, spec, state, overwrite=False)
            assert content(path) == state
        shutil.rmtree(path)
    return counts


def main():
    folder, spec, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    random.seed(seed)
    work = kill_builds if sys.argv[5:] == ["build"] else kill_changes
    sys.stdout.write(json.dumps(work(folder, spec, kills, seed)))


if __name__ == "__main__":
    main()
