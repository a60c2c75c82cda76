"""`--engine ray`: the commands give on a cluster what they give on one machine, and say what they cannot do."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shortlist.cli import main
from shortlist.commands.encode import encode
from shortlist.commands.engine import search_on_ray
from shortlist.commands.index import index
from shortlist.commands.search import search
from shortlist.data import read_run
from shortlist.errors import ConfigError, DataError, MissingExtraError, OutputExistsError
from shortlist.indexes import ShardedIndex, open_index, verify
from shortlist.indexes.sharded import part_name
from shortlist.retrieval.cluster import connect
from shortlist.retrieval.cluster_index import index_on_cluster
from shortlist.retrieval.store import VectorStore

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "scale-out.md"


def contents(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in Path(path).rglob("*")
        if file.is_file() and file.name not in ("manifest.json", "provenance.json")
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide_give_what_one_machine_gives(ray_cluster, toy_beir, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^\$ (shortlist .*)$", GUIDE.read_text(encoding="utf-8"), flags=re.M)
    assert [line.split()[1] for line in lines] == ["encode", "index", "search", "search"]
    for line in lines:
        words = [str(toy_beir) if word == "DIR" else word for word in line.split()[1:]]
        assert run_command([*words, "--model", str(model)]) == 0
    encode(data=toy_beir, output="here", model=model)
    index(data=toy_beir, output="whole", model=model)
    search(index="whole", data=toy_beir, output="whole.run", top_k=10)
    # A corpus this small is cut into a shard a worker, as `--processes 2` does it.
    ours, theirs = VectorStore.open("vectors"), VectorStore.open("here")
    assert (ours.num_shards, ours.ids) == (2, theirs.ids)
    assert np.array_equal(np.concatenate([ours.vectors(0), ours.vectors(1)]), theirs.vectors(0))
    sharded = open_index("parts")
    assert isinstance(sharded, ShardedIndex) and len(sharded.parts) == 2 and len(sharded) == len(open_index("whole"))
    verify("parts")
    assert dict(read_run("run.gz")) == dict(read_run("same.run.gz")) == dict(read_run("whole.run"))
    found = search_on_ray("ray", index="whole", query="sea", top_k=3, as_json=True)
    assert [result.id for result in found] == [result.id for result in search(index="whole", query="sea", top_k=3)]
    assert found[0].document.text
    # What was encoded is gone on with, on one machine as on many, and goes when it is indexed.
    encode(data=toy_beir, output="last.partial", model=model)
    assert index(data=toy_beir, output="last", model=model, engine="ray", workers=1)["documents"] == len(sharded)
    assert not Path("last.partial").exists() and not Path("last.parts").exists()
    with pytest.raises(OutputExistsError):
        index(data=toy_beir, output="last", model=model, engine="ray", shards=2)


def run_command(arguments):
    """Exit code of the command line, whose logging other tests must not see."""
    logger = logging.getLogger("shortlist")
    kept = logger.handlers[:], logger.propagate, logger.level
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        logger.handlers[:], logger.propagate = kept[:2]
        logger.setLevel(kept[2])
    return 0


class Killing:
    """The documents of a corpus; whoever reads those from row `at` on the first time is killed."""

    def __init__(self, corpus, marks, at):
        self.corpus, self.marks, self.at, self.fingerprint = corpus, Path(marks), at, corpus.fingerprint

    def slice(self, start, stop):
        with open(self.marks / "log", "a") as log:
            log.write(f"{start}\n")
        if start == self.at and not (self.marks / "died").exists():
            (self.marks / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.corpus.slice(start, stop)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_part_whose_worker_dies_is_built_again_and_finished_parts_are_kept(
    ray_cluster, toy, toy_beir, model, tmp_path
):
    from ray import cloudpickle

    store = encode(data=toy_beir, output=tmp_path / "v", model=model)
    half = len(store) // 2
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        with connect() as cluster:
            killing = Killing(toy.corpus, tmp_path, half)
            index_on_cluster(cluster, store, tmp_path / "i", shards=2, workers=1, corpus=killing)
            assert [int(line) for line in (tmp_path / "log").read_text().split()] == [0, half, half]
            index_on_cluster(cluster, store, tmp_path / "whole", shards=2, corpus=toy.corpus)
            assert contents(tmp_path / "i") == contents(tmp_path / "whole")
            # Documents of another collection: an error of a worker, with its class; the part that was fine is kept.
            wrong = Killing(type(toy.corpus).from_documents([*toy.corpus][:-1]), tmp_path, -1)
            with pytest.raises(DataError, match="documents"):
                index_on_cluster(cluster, store, tmp_path / "j", shards=2, workers=1, corpus=wrong)
            assert not (tmp_path / "j").exists() and (tmp_path / "j.parts" / part_name(0) / "manifest.json").exists()
            (tmp_path / "log").unlink()
            wrong.corpus = toy.corpus
            index_on_cluster(cluster, store, tmp_path / "j", shards=2, workers=1, corpus=wrong)
            assert (tmp_path / "log").read_text().split() == [str(half)]
            assert contents(tmp_path / "j") == contents(tmp_path / "whole")
            with pytest.raises(ConfigError, match="shards of"):
                index_on_cluster(cluster, store, tmp_path / "k", shards=len(store) + 1)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_local_cluster_starts_and_ends_quietly(toy_beir, model, tmp_path):
    index(data=toy_beir, output=tmp_path / "i", model=model)
    line = [sys.executable, "-m", "shortlist.cli", "search", "--index", str(tmp_path / "i"), "--query", "sea", "--json"]
    line += ["--engine", "ray", "--shards", "2", "--top-k", "3"]
    code = "from shortlist.cli import main; import sys; main(sys.argv[1:])"
    result = subprocess.run([sys.executable, "-c", code, *line[3:]], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["results"]) == 3
    assert "ray" not in result.stderr.lower() and len(result.stderr.splitlines()) <= 3, result.stderr


def test_options_of_ray_need_the_engine(toy_beir, model, tmp_path):
    with pytest.raises(ConfigError, match="--workers is for --engine ray"):
        encode(data=toy_beir, output=tmp_path / "v", model=model, workers=2)
    with pytest.raises(ConfigError, match="--shards is for --engine ray"):
        index(data=toy_beir, output=tmp_path / "i", model=model, shards=2)
    with pytest.raises(ConfigError, match="--replicas is for --engine ray"):
        search_on_ray("local", index=[tmp_path / "i"], replicas=2, query="sea")
    with pytest.raises(ConfigError, match="engine 'spark' is unknown; expected local or ray"):
        encode(data=toy_beir, output=tmp_path / "v", model=model, engine="spark")
    with pytest.raises(ConfigError, match="--processes is for one machine"):
        encode(data=toy_beir, output=tmp_path / "v", model=model, engine="ray", processes=2)
    with pytest.raises(ConfigError, match="not chosen or tuned while it is built"):
        index(data=toy_beir, output=tmp_path / "i", model=model, engine="ray", index="auto")
    with pytest.raises(ConfigError, match="pass --index"):
        search_on_ray("ray", index=[], data=toy_beir)
    assert not list(tmp_path.glob("[vi]"))


def test_a_missing_ray_is_said_with_its_extra(toy_beir, model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install shortlist\[ray\]"):
        encode(data=toy_beir, output=tmp_path / "v", model=model, engine="ray")
