"""The id table: the right position for every id and the right id for every position, wherever the ids are kept."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortlist.errors import DataError, MissingInputError
from shortlist.indexes import ids as ids_module
from shortlist.indexes.hashing import Encoded, hash_encoded
from shortlist.indexes.ids import BLOB, BUCKETS, OFFSETS, ORDER, IdTable, IdWriter


def written(directory, ids, *, distinct=True):
    directory.mkdir(parents=True, exist_ok=True)
    writer = IdWriter(directory)
    writer.append(ids)
    writer.close(distinct=distinct)
    return directory


def agrees(table, expected):
    """`expected`: id of each position, None where it was removed."""
    positions = {value: position for position, value in enumerate(expected) if value is not None}
    everything = np.flatnonzero([value is not None for value in expected])
    assert len(table) == len(expected) and table.num_present == len(positions)
    assert list(table) == [value for value in expected if value is not None]
    assert table.take(everything) == [expected[position] for position in everything]
    # Few positions are taken in another way than many.
    assert [table.take(everything[row : row + 1])[0] for row in range(len(everything))] == table.take(everything)
    assert table.find(list(positions)).tolist() == list(positions.values())
    absent = [value + "?" for value in positions] + ["", "\0", "absent"]
    assert (table.find(absent) == -1).all()
    alive = table.alive()
    assert (alive is None and None not in expected) or alive.tolist() == [value is not None for value in expected]
    assert table.removed_positions().tolist() == [row for row, value in enumerate(expected) if value is None]


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(names, unique=True, max_size=90), st.integers(0, 3), st.randoms(use_true_random=False))
def test_segments_and_tail_agree_with_a_list(tmp_path_factory, ids, segments, random):
    root = tmp_path_factory.mktemp("ids")
    cuts = sorted(random.randint(0, len(ids)) for _ in range(segments))
    parts = [ids[start:stop] for start, stop in zip([0, *cuts], cuts, strict=False)]
    stored = [value for part in parts for value in part]
    directories = [written(root / str(number), part) for number, part in enumerate(parts)]
    removed = np.array([random.random() < 0.3 for _ in stored], bool)
    table = IdTable.open(directories, removed)
    expected = [None if gone else value for value, gone in zip(stored, removed.tolist(), strict=True)]
    agrees(table, expected)

    # Added, removed and added again: an id has the position that it got last.
    tail = ids[len(stored) :]
    table.append(tail)
    expected += tail
    agrees(table, expected)
    gone = [row for row, value in enumerate(expected) if value is not None and random.random() < 0.4]
    table.remove(np.array(gone, np.int64))
    again = [expected[row] for row in gone if random.random() < 0.5]
    for row in gone:
        expected[row] = None
    table.append(again)
    expected += again
    agrees(table, expected)


@pytest.mark.parametrize("value", [0, 2**64 - 1, "two"])
def test_ids_of_equal_hash_are_told_apart(tmp_path, monkeypatch, value):
    def collide(encoded):
        if value == "two":
            return np.where(encoded.lengths % 2 == 0, np.uint64(5), np.uint64(2**63))
        return np.full(len(encoded.lengths), value, np.uint64)

    monkeypatch.setattr(ids_module, "hash_encoded", collide)
    ids = [f"d{number}" for number in range(400)] + ["ü", "u\u0308", "a b", "a\nb"]
    table = IdTable.open(written(tmp_path / "one", ids), np.arange(len(ids)) % 7 == 0)
    agrees(table, [None if row % 7 == 0 else value for row, value in enumerate(ids)])
    with pytest.raises(DataError, match="'d3' is given twice, as document 4 and 405"):
        written(tmp_path / "two", [*ids, "d3"])


def test_many_candidates_are_compared_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(ids_module, "hash_encoded", lambda encoded: np.zeros(len(encoded.lengths), np.uint64))
    monkeypatch.setattr(ids_module, "_CANDIDATES", 100)
    ids = [f"d{number:02d}" for number in range(60)]
    agrees(IdTable.open(written(tmp_path, ids)), ids)


def test_an_id_given_twice_in_two_blocks_is_named(tmp_path):
    writer = IdWriter(tmp_path)
    writer.append([f"d{number}" for number in range(1000)])
    writer.append(["new", "d17"])
    with pytest.raises(DataError, match="'d17' is given twice, as document 18 and 1,002"):
        writer.close()
    assert not list(tmp_path.glob("*.tmp"))


def test_ids_that_came_twice_are_kept_where_one_was_removed(tmp_path):
    written(tmp_path, ["a", "b", "a"], distinct=False)
    table = IdTable.open(tmp_path, np.array([True, False, False]))
    assert table.find(["a", "b"]).tolist() == [2, 1]


def test_an_empty_table_and_empty_segments(tmp_path):
    empty = written(tmp_path / "empty", [])
    agrees(IdTable.open(empty), [])
    agrees(IdTable(), [])
    agrees(IdTable.open([]), [])
    full = written(tmp_path / "full", ["a", "b"])
    agrees(IdTable.open([empty, full, empty]), ["a", "b"])


def test_few_and_many_ids_are_taken_from_all_segments(tmp_path):
    ids = [f"d{number}" for number in range(500)]
    directories = [written(tmp_path / str(start), ids[start : start + 120]) for start in range(0, 480, 120)]
    table = IdTable.open(directories)
    table.append(ids[480:])
    random = np.random.default_rng(0)
    for size in [0, 1, 10, 63, 64, 65, 500, 3000]:
        positions = random.integers(0, 500, size)
        assert table.take(positions) == [ids[position] for position in positions]
    assert [start for start, _ in table.column()] == [0, 120, 240, 360, 480]
    assert [value for _, chunk in table.column() for value in chunk.to_pylist()] == ids


def test_opening_hashes_nothing_and_reads_no_id(tmp_path, monkeypatch):
    # Opening must take the same time for a hundred million ids.
    written(tmp_path, [f"d{number}" for number in range(1000)])
    monkeypatch.setattr(ids_module, "hash_encoded", None)
    monkeypatch.setattr(IdTable, "take", None)
    table = IdTable.open(tmp_path)
    (part,) = table._parts
    assert len(table) == 1000
    for array in (part.offsets, part.buckets, part.order):
        assert isinstance(array.base, np.memmap)


def test_every_process_finds_what_another_wrote(tmp_path):
    ids = ["a", "b c", "ü", "x\ny", "10", "https://example.org/1", "z" * 300]
    program = """if True:
        import sys
        from pathlib import Path
        from shortlist.indexes.ids import IdTable, IdWriter
        ids = ["a", "b c", "ü", "x\\ny", "10", "https://example.org/1", "z" * 300]
        if sys.argv[1] == "write":
            writer = IdWriter(Path(sys.argv[2]))
            writer.append(ids)
            writer.close()
        print(IdTable.open(Path(sys.argv[2])).find(ids).tolist())
    """
    for seed, verb in (("1", "write"), ("2", "read")):
        done = subprocess.run(
            [sys.executable, "-c", program, verb, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, encoding="utf-8", check=True,
        )  # fmt: skip
        assert done.stdout.strip() == str(list(range(len(ids))))
    assert IdTable.open(tmp_path).find(ids).tolist() == list(range(len(ids)))


def reference_hash(value):
    """The hash, a word at a time in Python's whole numbers."""
    content, whole = value.encode(), 2**64 - 1
    if len(content) > 256:
        import hashlib

        mixed = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    else:
        mixed = len(content) * 0x9E3779B97F4A7C15 & whole
        for start in range(0, len(content), 8):
            mixed = (mixed ^ int.from_bytes(content[start : start + 8], "little")) * 0x9E3779B97F4A7C15 & whole
            mixed ^= mixed >> 29
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ mixed >> 33) * multiplier & whole
    return mixed ^ mixed >> 33


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.one_of(names, st.integers(0, 600).map("x".__mul__)), max_size=20))
def test_the_hash_is_the_same_on_every_platform(values):
    assert hash_encoded(Encoded(values)).tolist() == [reference_hash(value) for value in values]


def test_the_hash_never_changes():
    # Stored tables rely on these numbers.
    assert hash_encoded(Encoded(["doc 1", "y" * 257])).tolist() == [17958589459125447193, 17649950285913707066]


def test_hashes_are_spread_evenly():
    ids = [f"https://example.org/id/p{number * 7}" for number in range(20_000)]
    hashes = hash_encoded(Encoded(ids))
    assert len(np.unique(hashes)) == len(ids)
    for shift in (0, 20, 52):
        counts = np.bincount((hashes >> np.uint64(shift) & np.uint64(255)).astype(np.int64), minlength=256)
        # 78 on average with a deviation of 9.
        assert counts.min() > 35 and counts.max() < 130


def test_a_large_table_is_sorted_in_ranges(tmp_path, monkeypatch):
    ids = [f"d{number}" for number in range(5000)]
    whole = written(tmp_path / "whole", ids)
    monkeypatch.setattr(ids_module, "_SORTED", 300)
    ranges = written(tmp_path / "ranges", ids)
    for name in (BLOB, OFFSETS, BUCKETS, ORDER):
        assert (whole / name).read_bytes() == (ranges / name).read_bytes()
    with pytest.raises(DataError, match="'d4999' is given twice, as document 5,000 and 5,001"):
        written(tmp_path / "twice", [*ids, "d4999"])
    agrees(IdTable.open(ranges), ids)


def test_writing_holds_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(ids_module, "_SORTED", 1 << 13)
    tracemalloc.start()
    try:
        writer = IdWriter(tmp_path)
        for start in range(0, 200_000, 5000):
            writer.append(f"document {number}" for number in range(start, start + 5000))
        writer.close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Hash, offset and position of every id would be 5 MB, the ids 12 MB.
    assert peak < 4 << 20
    assert IdTable.open(tmp_path).find(["document 7", "document 199999", "x"]).tolist() == [7, 199_999, -1]


@pytest.mark.slow
def test_a_million_ids(tmp_path):
    writer = IdWriter(tmp_path)
    for start in range(0, 1_000_000, 50_000):
        writer.append([f"document {number}" for number in range(start, start + 50_000)])
    writer.close()
    table = IdTable.open(tmp_path)
    positions = np.random.default_rng(0).permutation(1_000_000)
    ids = [f"document {position}" for position in positions.tolist()]
    assert (table.find(ids) == positions).all() and table.take(positions) == ids
    assert (table.find([value + "0" for value in ids[:1000] if len(value) == 15]) == -1).all()


def test_the_version_changes_with_the_table(tmp_path):
    table = IdTable.open(written(tmp_path, ["a", "b"]))
    versions = [table.version]
    table.append(["c"])
    versions.append(table.version)
    table.remove(np.array([0]))
    versions.append(table.version)
    table.remove(np.array([], np.int64))
    assert len(set(versions)) == 3 and table.version == versions[-1]


def test_damaged_files_are_named(tmp_path):
    directory = written(tmp_path, [f"d{number}" for number in range(100)])
    (directory / BUCKETS).rename(directory / "away")
    with pytest.raises(MissingInputError, match="ids.buckets.npy is missing"):
        IdTable.open(directory).find(["d1"])
    (directory / "away").rename(directory / BUCKETS)
    np.save(directory / ORDER, np.arange(99, dtype=np.uint32))
    with pytest.raises(DataError, match="ids.order.npy is the hash table of other ids"):
        IdTable.open(directory)
    with open(directory / BLOB, "ab") as handle:
        handle.write(b"x")
    with pytest.raises(DataError, match="ids.utf8 has 291 bytes"):
        IdTable.open(directory)


def test_marks_of_removal_must_fit(tmp_path):
    directory = written(tmp_path, ["a", "b"])
    with pytest.raises(DataError, match="3 marks of removal for 2 ids"):
        IdTable.open(directory, np.zeros(3, bool))


def test_half_a_surrogate_pair_is_refused_by_name(tmp_path):
    writer = IdWriter(Path(tmp_path))
    with pytest.raises(DataError, match="lone surrogate"):
        writer.append(["a", "\ud800"])
    writer.abort()
    table = IdTable.open(written(tmp_path / "whole", ["a"]))
    with pytest.raises(DataError, match="lone surrogate"):
        table.find(["\ud800"])
