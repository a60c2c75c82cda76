"""Searching on a Ray cluster: the results of one exact index, complete whoever dies, or an error."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from shortlist.errors import ConfigError, MissingInputError, ShortlistError
from shortlist.indexes import build_index, open_index
from shortlist.indexes.sharded import part_name, write_sharded
from shortlist.retrieval import cluster_pool
from shortlist.retrieval.cluster import connect
from shortlist.retrieval.cluster_pool import Pool
from shortlist.retrieval.cluster_search import ClusterIndex, divide

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DIM, COUNT = 16, 611


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with connect() as joined:
        yield joined


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(5)
    vectors = random.standard_normal((COUNT, DIM)).astype(np.float32)
    vectors[40:60] = vectors[3]
    vectors[200:600:7] = vectors[3]  # ties across all parts
    return [f"d{number * 7919 % 1000:03d}" for number in range(COUNT)], vectors


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """`single`, one exact index with documents and some removed; `sharded`, the same in three parts; `graph`, hnsw."""
    path = tmp_path_factory.mktemp("indexes")
    ids, vectors = data
    records = [SimpleNamespace(id=id, title=id, text="", metadata={"year": 1990 + int(id[1:]) % 40}) for id in ids]
    build_index(path / "single", [(ids, vectors)], dim=DIM, documents=records)
    (path / "sharded").mkdir()
    for number, (start, stop) in enumerate([(0, 100), (100, 420), (420, COUNT)]):
        build_index(
            path / "sharded" / part_name(number), [(ids[start:stop], vectors[start:stop])], dim=DIM,
            documents=records[start:stop],
        )  # fmt: skip
    write_sharded(path / "sharded", [part_name(number) for number in range(3)])
    build_index(path / "graph", [(ids, vectors)], dim=DIM, spec="hnsw")
    for name in ("single", "sharded"):
        index = open_index(path / name)
        index.remove(ids[30:45])
        index.commit()
    return path


@pytest.fixture(scope="module")
def queries(data):
    random = np.random.default_rng(6)
    return np.concatenate([random.standard_normal((60, DIM)), data[1][3:4], -data[1][3:4]]).astype(np.float32)


@pytest.fixture(scope="module")
def ranges(cluster, folder):
    """The one exact index in two ranges, with two actors each."""
    with ClusterIndex(folder / "single", cluster, shards=2, replicas=2) as index:
        yield index


@pytest.fixture
def single(folder):
    return open_index(folder / "single", device="cpu")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(cluster_pool, "BATCH", 8)


def killing(monkeypatch, pids, at):
    """Kill the processes `pids` when answer number `at` is about to be taken."""
    taken, original = [], Pool._answer

    def answer(self, part, *sent):
        taken.append(part.number)
        if len(taken) == at:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return original(self, part, *sent)

    monkeypatch.setattr(Pool, "_answer", answer)
    return taken


def test_results_are_those_of_one_machine(ranges, single, queries, data):
    assert [(part.start, part.stop) for part in ranges.parts] == [(0, 320), (320, COUNT)]
    for k in (1, 7, 100, COUNT + 5):
        assert ranges.search(queries, k) == single.search(queries, k)
    for filter in ("year >= 2010", "year < 1900", {*data[0][::90], "nobody"}, "id < 'd100' or not year < 2025"):
        assert ranges.search(queries, 20, filter) == single.search(queries, 20, filter)
    assert ranges.search(queries[:0], 3) == [] and len(ranges) == COUNT - 15
    assert ranges.document(data[0][99])["title"] == data[0][99]
    ours, theirs = ranges.search_arrays(queries, 9), single.search_arrays(queries, 9)
    assert all(np.array_equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


def test_several_searches_at_once(ranges, single, queries):
    with ThreadPoolExecutor(4) as threads:
        filters = [None, "year >= 2010", None, "year < 2000", "year == 2001", None]
        found = list(threads.map(lambda filter: ranges.search(queries, 30, filter), filters))
    assert found == [single.search(queries, 30, filter) for filter in filters]


def test_an_actor_that_is_killed_during_a_search_is_passed_over(ranges, single, queries, monkeypatch):
    victim = ranges._pool.pids()[0][0]
    taken = killing(monkeypatch, [victim], at=3)
    assert ranges.search(queries, 50) == single.search(queries, 50)
    assert len(taken) == 2 * 8
    # And another takes its place.
    assert ranges.search(queries, 50) == single.search(queries, 50)
    pids = ranges._pool.pids()
    assert [len(group) for group in pids] == [2, 2] and victim not in pids[0]


def test_all_actors_of_a_part_killed_at_once_are_started_anew(ranges, single, queries, monkeypatch, ray_cluster):
    killing(monkeypatch, ranges._pool.pids()[1], at=2)
    assert ranges.search(queries, 50, "year >= 2000") == single.search(queries, 50, "year >= 2000")
    ray_cluster.kill(ranges._pool._replicas[0][0].actor)
    assert ranges.search(queries, 50) == single.search(queries, 50)


def test_what_is_removed_here_is_left_out_and_nothing_is_written(ranges, single, queries, data):
    gone = data[0][300:340]
    assert ranges.remove(gone) == single.remove(gone) == 40
    assert ranges.search(queries, 100) == single.search(queries, 100)
    for refused in (ranges.commit, ranges.compact, lambda: ranges.save("x"), lambda: ranges.add(["x"], np.ones(DIM))):
        with pytest.raises(ConfigError, match="only searched; open it with open_index"):
            refused()


def test_a_lost_part_is_an_error_and_never_a_shorter_list(cluster, folder, single, queries, monkeypatch, ranges):
    ranges.close()  # the CPUs are wanted
    with pytest.raises(ShortlistError, match="no actor is left for part 0.*the index was closed"):
        ranges.search(queries, 1)
    with ClusterIndex(folder / "sharded", cluster, restarts=0) as index:
        assert index.search(queries, 40) == single.search(queries, 40)
        assert index.search(queries, 5, "year == 2001") == single.search(queries, 5, "year == 2001")
        killing(monkeypatch, index._pool.pids()[1], at=5)
        with pytest.raises(ShortlistError, match=r"no actor is left for part 1 \(positions 100 to 419 .*part-00001\)"):
            index.search(queries, 40)
        with pytest.raises(ShortlistError, match=r"part 1 .*there is no result"):
            index.search(queries[:1], 1)
        # A filter whose documents are all elsewhere needs nothing of the lost part.
        first = {id for id in single.ids_at(np.arange(100)) if id in single}
        assert index.search(queries, 5, first) == single.search(queries, 5, first)


def test_what_cannot_be_searched_on_a_cluster_is_said(cluster, folder, tmp_path):
    with pytest.raises(MissingInputError, match="no index at"):
        ClusterIndex(tmp_path / "nothing", cluster)
    with pytest.raises(ConfigError, match="shards is 0"):
        ClusterIndex(folder / "single", cluster, shards=0)
    with pytest.raises(ConfigError, match="built in 3 parts"):
        ClusterIndex(folder / "sharded", cluster, shards=2)
    with pytest.raises(ConfigError, match="hnsw, which cannot be divided"):
        ClusterIndex(folder / "graph", cluster, shards=2)
    with pytest.raises(ConfigError, match="need a GPU each"):
        ClusterIndex(folder / "single", cluster, shards=2, device="cuda")


def test_an_index_that_changed_since_is_not_searched(cluster, folder):
    import dataclasses

    index = open_index(folder / "single")
    parts = [dataclasses.replace(part, checksum="other") for part in divide(index, folder / "single", 1, nodes=1)]
    with pytest.raises(ShortlistError, match="not what it was when the search began"):
        Pool(cluster, parts, replicas=1, device="cpu", restarts=0, start_seconds=60)


def test_parts_cover_every_position_once(folder):
    index = open_index(folder / "single")
    for shards in (1, 2, 3, 5, 9, 50):
        parts = divide(index, folder / "single", shards, nodes=1)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == COUNT and len(parts) <= shards
        assert all(part.start % 64 == 0 < part.stop - part.start for part in parts)
