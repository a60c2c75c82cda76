"""An index in parts: the results of one exact index, whatever is removed, filtered, tied or asked for."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingInputError, ShortlistError
from shortlist.indexes import ExactIndex, build_index, new_index, open_index, verify
from shortlist.indexes.filters import field
from shortlist.indexes.sharded import ShardedIndex, merge_found, part_name, write_sharded
from shortlist.types import rank_order

DIM, COUNT = 16, 301


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(5)
    vectors = random.standard_normal((COUNT, DIM)).astype(np.float32)
    # Ties in one part and across parts, and a run of them longer than any k that is asked for.
    vectors[40:60] = vectors[3]
    vectors[200:290:7] = vectors[3]
    ids = [f"d{number * 7919 % 1000:03d}" for number in range(COUNT)]
    return ids, vectors


def documents(ids):
    return [SimpleNamespace(id=id, title=id, text="text", metadata={"year": 1990 + int(id[1:]) % 40}) for id in ids]


def build(path, data, *, parts=3, spec="exact", metric="ip", with_documents=True):
    ids, vectors = data
    path.mkdir()
    names = [part_name(number) for number in range(parts)]
    bounds = [COUNT * number // parts for number in range(parts + 1)]
    for name, start, stop in zip(names, bounds, bounds[1:], strict=False):
        build_index(
            path / name, [(ids[start:stop], vectors[start:stop])], dim=DIM, spec=spec, metric=metric,
            documents=documents(ids[start:stop]) if with_documents else None, model={"fingerprint": "f", "name": "m"},
        )  # fmt: skip
    write_sharded(path, names)
    return path


@pytest.fixture
def directory(tmp_path, data):
    return build(tmp_path / "sharded", data)


@pytest.fixture
def single(tmp_path, data):
    ids, vectors = data
    build_index(tmp_path / "single", [(ids, vectors)], dim=DIM, documents=documents(ids), model={"fingerprint": "f"})
    return open_index(tmp_path / "single", device="cpu")


@pytest.fixture
def queries(data):
    random = np.random.default_rng(6)
    return np.concatenate([random.standard_normal((20, DIM)), data[1][3:4], -data[1][3:4]]).astype(np.float32)


def same(ours, theirs):
    assert ours == theirs  # ids and the very scores


@pytest.mark.parametrize("k", [1, 5, 33, COUNT, COUNT + 50])
def test_results_are_those_of_one_exact_index(directory, single, queries, k):
    sharded = open_index(directory, device="cpu")
    assert isinstance(sharded, ShardedIndex) and len(sharded.parts) == 3
    same(sharded.search(queries, k), single.search(queries, k))
    positions, scores, counts = sharded.search_arrays(queries, k)
    theirs = single.search_arrays(queries, k)
    assert np.array_equal(positions, theirs[0]) and np.array_equal(scores, theirs[1])
    assert counts.tolist() == [min(k, COUNT)] * len(queries)
    assert sharded.ids_at(positions[0]) == single.ids_at(theirs[0][0])


@pytest.mark.parametrize(
    "filter",
    [
        "year >= 2010", field("year") == 2001, "year < 1900", {"d003", "d919", "nobody"},
        "id < 'd100' or not year < 2025",
    ],
    ids=["from", "equal", "none", "ids", "either"],
)  # fmt: skip
def test_filters_and_removals_are_those_of_one_index(directory, single, queries, filter, data):
    sharded = open_index(directory, device="cpu")
    gone = data[0][35:50] + data[0][::50]
    for index in (sharded, single):
        index.remove(gone)
    assert len(sharded) == len(single) and gone[0] not in sharded
    for k in (3, 40, COUNT):
        same(sharded.search(queries, k, filter), single.search(queries, k, filter))
        same(sharded.search(queries, k), single.search(queries, k))


def test_removals_are_committed_in_one_step_and_the_parts_stay_as_they_are(directory, single, queries, data):
    parts = {file: file.read_bytes() for file in directory.rglob("part-*/**/*") if file.is_file()}
    sharded, other = open_index(directory, device="cpu"), open_index(directory, device="cpu")
    generation = sharded.commit()
    gone = data[0][10:130]
    assert sharded.remove([*gone, "nobody"]) == single.remove(gone) == 120
    assert sharded.commit() == generation + 1
    assert sharded.commit() == generation + 1  # nothing to write
    reopened = open_index(directory, device="cpu")
    same(reopened.search(queries, 50), single.search(queries, 50))
    assert len(other) == COUNT  # who has opened the old generation keeps it
    other.remove(data[0][:1])
    with pytest.raises(ShortlistError, match="was changed since this index was opened"):
        other.commit()
    assert {file: file.read_bytes() for file in directory.rglob("part-*/**/*") if file.is_file()} == parts
    reopened.remove(data[0][130:131])
    reopened.commit()
    assert len(list(directory.glob("removed-*.npy"))) == 1
    assert len(open_index(directory)) == COUNT - 121
    verify(directory)


def test_documents_blocks_vectors_and_stats(directory, data):
    ids, vectors = data
    sharded = open_index(directory, device="cpu")
    sharded.remove(ids[100:103])
    assert sharded.document(ids[250])["title"] == ids[250] and sharded.document("nobody") is None
    assert np.array_equal(sharded.vectors_at([0, 300, 150]), vectors[[0, 300, 150]])
    blocks = list(sharded.blocks(size=64))
    assert [id for block in blocks for id in block.ids] == ids[:100] + ids[103:] == list(sharded.ids)
    assert np.array_equal(np.concatenate([block.vectors for block in blocks]), np.delete(vectors, [100, 101, 102], 0))
    stats = sharded.stats()
    assert (stats["parts"], stats["count"], stats["removed"], stats["kind"]) == (3, COUNT - 3, 3, "sharded")
    assert stats["bytes"] > COUNT * DIM * 4 and stats["spec"] == "exact" and stats["model"] == "m"


def test_all_parts_merge_into_one_index(directory, single, queries, data):
    sharded = open_index(directory, device="cpu")
    sharded.remove(data[0][:9])
    single.remove(data[0][:9])
    merged = new_index("exact", DIM, device="cpu")
    assert merged.merge(sharded) == COUNT - 9
    same(merged.search(queries, 60, "year >= 2000"), single.search(queries, 60, "year >= 2000"))
    assert merged.document(data[0][200])["metadata"] == single.document(data[0][200])["metadata"]


@pytest.mark.parametrize(("spec", "metric"), [("exact:int8", "ip"), ("flat", "ip"), ("flat", "l2"), ("hnsw", "l2")])
def test_other_kinds_of_parts(tmp_path, data, queries, spec, metric):
    ids, vectors = data
    sharded = open_index(build(tmp_path / "s", data, spec=spec, metric=metric), device="cpu")
    scores = queries @ vectors.T
    if metric == "l2":
        scores = -np.square(queries[:, None] - vectors[None]).sum(axis=2)
    found = sharded.search(queries, 10)
    for row, results in enumerate(found):
        best = [ids[position] for position in rank_order(ids, np.round(scores[row], 4))[:10]]
        ours = [id for id, _ in results]
        if row < 20:  # the rest tie, and rounding is not theirs
            assert len(set(ours) & set(best)) >= (8 if spec == "hnsw" else 10)
        assert len(set(ours)) == 10


def test_merging_keeps_ties_until_the_ids_have_decided():
    random = np.random.default_rng(0)
    ids = [f"{number:03d}" for number in random.permutation(60)]
    take = lambda positions: [ids[position] for position in positions]  # noqa: E731
    for k in (1, 4, 10, 25):
        scores = random.integers(0, 4, (8, 60)).astype(np.float32)
        found = []
        for start in range(0, 60, 20):
            part = np.full((8, min(k, 20)), -1), np.full((8, min(k, 20)), -np.inf, np.float32)
            for row in range(8):
                order = rank_order(ids[start : start + 20], scores[row, start : start + 20])[: min(k, 20)]
                part[0][row], part[1][row] = order + start, scores[row, order + start]
            found.append((*part, np.full(8, min(k, 20))))
        positions, merged, counts = merge_found(found, k, take)
        for row in range(8):
            assert positions[row].tolist() == rank_order(ids, scores[row])[:k].tolist()
            assert np.array_equal(merged[row], scores[row, positions[row]])
        assert counts.tolist() == [k] * 8


def test_what_a_sharded_index_does_not_take_is_said(directory, data):
    sharded = open_index(directory, device="cpu")
    for refused in (
        lambda: sharded.add(["x"], np.zeros((1, DIM))), lambda: sharded.merge(ExactIndex(DIM)),
        lambda: sharded.save(directory), sharded.compact,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"new_index\(spec, dim\)\.merge\(sharded\)"):
            refused()
    assert len(sharded) == COUNT


def test_parts_that_do_not_belong_together_are_refused(tmp_path, data, directory):
    ids, vectors = data
    build_index(directory / "part-00003", [(["new", ids[0]], vectors[:2])], dim=DIM, model={"fingerprint": "f"})
    with pytest.raises(DataError, match=f"id '{ids[0]}' is in part-00003 and in an earlier part"):
        write_sharded(directory, [part_name(number) for number in range(4)])
    for options in ({"spec": "flat"}, {"dim": 8}, {"model": {"fingerprint": "other"}}):
        settings = {"dim": DIM, "model": {"fingerprint": "f"}, **options}
        rows = vectors[:2, : settings["dim"]]
        build_index(directory / "part-00003", [(["new", "newer"], rows)], overwrite=True, **settings)
        with pytest.raises(IndexMismatchError, match="must agree"):
            write_sharded(directory, [part_name(number) for number in range(4)])
    assert len(open_index(directory)) == COUNT  # the old manifest stands


def test_damage_is_found_and_named(directory, data):
    index = open_index(directory / "part-00001")
    index.remove(data[0][120:121])
    index.commit()
    with pytest.raises(DataError, match="part-00001 was changed since"):
        open_index(directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    for key, value, error, message in (
        ("parts", [{"name": "../x", "positions": 1, "manifest": ""}], DataError, "lacks its name"),
        ("parts", [{"name": "gone", "positions": 1, "manifest": ""}], MissingInputError, "gone is missing"),
        ("count", "7", DataError, "'count' is '7'"),
        ("format_version", 9, DataError, "version 9"),
    ):
        (directory / "manifest.json").write_text(json.dumps({**manifest, key: value}))
        with pytest.raises(error, match=message):
            open_index(directory)


def test_verify_reads_every_file_of_every_part(directory):
    verify(directory)
    open_index(directory).verify()
    file = next((directory / "part-00002").rglob("vectors-00000.npy"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match="part-00002.*vectors-00000.npy"):
        verify(directory)
