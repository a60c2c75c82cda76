"""Encoding on a Ray cluster: the bytes of one machine, a lost worker's shard redone once and nothing twice."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from shortlist import DualEncoder
from shortlist.data import Corpus
from shortlist.errors import ConfigError, MissingInputError, NonFiniteError, ShortlistError
from shortlist.retrieval import cluster_encode
from shortlist.retrieval.cluster import Node as ClusterNode
from shortlist.retrieval.cluster import connect, share_cpus
from shortlist.retrieval.cluster_encode import encode_on_cluster
from shortlist.retrieval.encode import encode_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHARD = 10


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with connect() as joined:
        yield joined


@pytest.fixture(scope="module")
def corpus():
    return Corpus.from_documents(
        [(f"d{n}", " ".join(["cat", "sea", "old", "tree"][: 1 + n % 4] * 3)) for n in range(57)]
    )


@pytest.fixture(scope="module")
def encoder(tiny_transformer):
    return DualEncoder.from_pretrained(tiny_transformer)


class Watched:
    """A corpus whose readers leave a line a shard, and which can be the death of them.

    Args:
        corpus: what is read.
        log: file of lines "pid shard".
        dies: shard whose first reader is killed when its vectors are finished but not yet in place.
        kills: shard whose every reader is killed then.
        waits: shard whose first reader waits to be killed from outside.
    """

    def __init__(self, corpus, log, *, dies=None, kills=None, waits=None):
        self.corpus, self.log, self.dies, self.kills, self.waits = corpus, Path(log), dies, kills, waits
        self.fingerprint = corpus.fingerprint
        self.reads = {}

    def __len__(self):
        return len(self.corpus)

    def texts(self, template=None, start=0, stop=None):
        with open(self.log, "a") as log:
            log.write(f"{os.getpid()} {start // SHARD}\n")
        if start // SHARD == self.waits and not self.log.with_suffix(".go").exists():
            time.sleep(120)  # the test kills this process long before
        return self.corpus.texts(template, start, stop)

    @property
    def ids(self):
        return WatchedIds(self)

    def read(self, shard):
        # The ids of a shard are read three times, the last when its vectors are written.
        self.reads[shard] = self.reads.get(shard, 0) + 1
        once = self.log.with_suffix(".died")
        if self.reads[shard] == 3 and (shard == self.kills or (shard == self.dies and not once.exists())):
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class WatchedIds:
    def __init__(self, watched):
        self.watched = watched

    def __getitem__(self, key):
        if isinstance(key, slice):
            self.watched.read(key.start // SHARD)
        return self.watched.corpus.ids[key]


@pytest.fixture(scope="module", autouse=True)
def watched_by_value():
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def contents(path):
    return {file.name: file.read_bytes() for file in Path(path).iterdir() if file.name != "manifest.json"}


def shards_read(log):
    return sorted(int(line.split()[1]) for line in log.read_text().splitlines())


@pytest.fixture(scope="module")
def expected(encoder, corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("single") / "v"
    encode_corpus(encoder, corpus, path, shard_size=SHARD)
    return path


def test_the_bytes_are_those_of_one_machine_and_finished_shards_are_kept(cluster, encoder, corpus, expected, tmp_path):
    log = tmp_path / "log"
    out = tmp_path / "v"
    # Half of it as `--shard 1/2` of one machine would have left it.
    encode_corpus(encoder, corpus, out, shard_size=SHARD, shard=(1, 2))
    store = encode_on_cluster(cluster, encoder, Watched(corpus, log), out, workers=2, shard_size=SHARD)
    assert store.ids == list(corpus.ids)
    assert contents(out) == contents(expected)  # and so no model, mark or temporary file is left
    assert shards_read(log) == [3, 4, 5]
    ours, theirs = store.manifest, store.open(expected).manifest
    assert {k: ours[k] for k in ours if k not in ("command", "created")} == {
        k: theirs[k] for k in theirs if k not in ("command", "created")
    }


def test_workers_that_die_lose_one_shard_each_which_is_redone_once(cluster, encoder, corpus, expected, tmp_path):
    log, out = tmp_path / "log", tmp_path / "v"
    killed = []

    def kill():
        for _ in range(2400):
            found = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
            if victims := [int(pid) for pid, shard in found if shard == "1"]:
                log.with_suffix(".go").touch()
                os.kill(victims[0], signal.SIGKILL)
                killed.append(victims[0])
                return
            time.sleep(0.1)

    thread = threading.Thread(target=kill)
    thread.start()
    watched = Watched(corpus, log, dies=2, waits=1)
    encode_on_cluster(cluster, encoder, watched, out, workers=2, shard_size=SHARD)
    thread.join()
    assert killed and log.with_suffix(".died").exists()
    assert contents(out) == contents(expected)
    assert shards_read(log) == [0, 1, 1, 2, 2, 3, 4, 5]


def test_a_shard_that_always_ends_its_worker_is_named_and_the_rest_is_kept(
    cluster, encoder, corpus, expected, tmp_path, monkeypatch
):
    log, out = tmp_path / "log", tmp_path / "v"
    monkeypatch.setattr(cluster_encode, "ATTEMPTS", 2)
    with pytest.raises(ShortlistError, match=r"shard 0 ended its worker 2 times"):
        encode_on_cluster(cluster, encoder, Watched(corpus, log, kills=0), out, workers=1, shard_size=SHARD)
    assert shards_read(log).count(0) == 2
    encode_corpus(encoder, corpus, out, shard_size=SHARD)  # one machine goes on with it as well
    assert contents(out) == contents(expected)


def test_errors_of_a_worker_keep_their_class_and_name_the_document(cluster, corpus, tiny_static, tmp_path):
    encoder = DualEncoder.from_pretrained(tiny_static)
    with torch.no_grad():
        next(iter(encoder.parameters()))[:] = float("nan")
    with pytest.raises(NonFiniteError, match="d\\d+"):
        encode_on_cluster(cluster, encoder, corpus, tmp_path / "v", workers=1, shard_size=SHARD)


def test_what_the_cluster_cannot_do_is_said_before_anything_is_written(cluster, encoder, corpus, tmp_path):
    with pytest.raises(ConfigError, match="400 workers need one of the cluster's CPUs each, and it has "):
        encode_on_cluster(cluster, encoder, corpus, tmp_path / "v", workers=400)
    with pytest.raises(ConfigError, match="workers is 0"):
        encode_on_cluster(cluster, encoder, corpus, tmp_path / "v", workers=0)
    with pytest.raises(ConfigError, match="device 'mps'"):
        encode_on_cluster(cluster, encoder, corpus, tmp_path / "v", device="mps")
    assert not (tmp_path / "v").exists()
    with pytest.raises(MissingInputError, match="does not see .*nowhere.*share"):
        cluster.check_nodes([tmp_path / "nowhere"])


def test_cpus_are_shared_by_node():
    nodes = [ClusterNode("a", "1", 16, 0), ClusterNode("b", "2", 16, 0)]
    assert [share_cpus(nodes, actors) for actors in (1, 2, 3, 4, 32, 33)] == [16, 16, 8, 8, 1, 0]
