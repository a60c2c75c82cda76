"""Encoding to disk: streamed, restartable to the same bytes, by several processes, with failures told."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from shortlist import DualEncoder
from shortlist.commands.encode import encode, parse_shard
from shortlist.data import Corpus
from shortlist.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    NonFiniteError,
    OutputExistsError,
    ShortlistError,
)
from shortlist.retrieval import engine, workers
from shortlist.retrieval.encode import VectorStore, encode_corpus
from shortlist.retrieval.engine import Forward, ahead


@pytest.fixture(scope="module")
def corpus():
    documents = [(f"d{n}", " ".join(["cat", "sea", "old", "tree"][: 1 + n % 4] * (1 + n % 7))) for n in range(100)]
    return Corpus.from_documents([*documents, ("with a space", "the fish"), ("empty", "")])


@pytest.fixture
def encoder(bert_folder):
    return DualEncoder.from_pretrained(bert_folder)


def contents(path):
    return {file.name: file.read_bytes() for file in Path(path).glob("*.[nj]*") if file.name != "manifest.json"}


def test_shards_hold_what_encode_documents_gives(encoder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "WINDOW", 16)
    monkeypatch.setattr("shortlist.retrieval.encode.WINDOW", 16)
    store = encode_corpus(encoder, corpus, tmp_path / "v", shard_size=40)
    assert (len(store), store.num_shards, store.dim, store.fingerprint) == (102, 3, 32, encoder.fingerprint)
    opened = VectorStore.open(tmp_path / "v")
    assert opened.ids == list(corpus.ids)
    blocks = list(opened)
    assert [len(ids) for ids, _ in blocks] == [40, 40, 22] and isinstance(blocks[0][1], np.memmap)
    expected = encoder.encode_documents(list(corpus.texts()))
    assert np.abs(np.concatenate([vectors for _, vectors in blocks]) - expected).max() < 1e-5
    # user-reports D.98, C.71
    manifest = json.loads((tmp_path / "v" / "manifest.json").read_text())
    assert manifest["batch_tokens"] > 0 and manifest["dtype"] == "float32" and manifest["doc_max_length"] == 48
    assert str(tmp_path) not in json.dumps({key: manifest[key] for key in manifest if key != "command"})


def test_a_restart_keeps_finished_shards_and_ends_with_the_same_bytes(encoder, corpus, tmp_path):
    encode_corpus(encoder, corpus, tmp_path / "whole", shard_size=30)
    encode_corpus(encoder, corpus, tmp_path / "cut", shard_size=30)
    kept = tmp_path / "cut" / "vectors-00000.npy"
    before = kept.stat().st_mtime_ns
    (tmp_path / "cut" / "vectors-00001.npy").unlink()
    (tmp_path / "cut" / "ids-00003.json").unlink()
    with pytest.raises(DataError, match=r"2 of 4 shards are missing, the first is vectors-00001.npy"):
        VectorStore.open(tmp_path / "cut")
    encode_corpus(encoder, corpus, tmp_path / "cut", shard_size=30)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert kept.stat().st_mtime_ns == before


_SCRIPT = """
import sys
from shortlist import DualEncoder
from shortlist.data import Corpus
from shortlist.retrieval.encode import encode_corpus
import shortlist.retrieval.static as static
if sys.argv[3] == "slow":
    import time
    plain = static.StaticTower.vectors
    static.StaticTower.vectors = lambda *a, **k: (time.sleep(0.2), plain(*a, **k))[1]
corpus = Corpus.from_documents((f"d{n}", f"cat sea {'tree ' * (n % 5)}") for n in range(300))
encode_corpus(DualEncoder.from_pretrained(sys.argv[1]), corpus, sys.argv[2], shard_size=20)
"""


def test_killed_and_started_again_gives_the_same_bytes(static_folder, tmp_path):
    def start(output, speed):
        return subprocess.Popen([sys.executable, "-c", _SCRIPT, str(static_folder), str(output), speed])

    assert start(tmp_path / "whole", "fast").wait() == 0
    process = start(tmp_path / "cut", "slow")
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "cut").glob("vectors-*.npy"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 3 <= len(list((tmp_path / "cut").glob("vectors-*.npy"))) < 15
    assert start(tmp_path / "cut", "fast").wait() == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_full_disk_is_an_error_by_name_and_not_a_bus_error(encoder, corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left") as caught:
        encode_corpus(encoder, corpus, tmp_path / "v")
    assert caught.value.filename == str(tmp_path / "v" / "vectors-00000.npy")
    assert not list((tmp_path / "v").rglob("*.npy"))


def test_parts_fill_one_directory(static_folder, toy_beir, tmp_path):
    for part in ("1/3", "3/3"):
        encode(data=toy_beir, model=static_folder, output=tmp_path / "v", shard=part)
    with pytest.raises(DataError, match="1 of 3 shards are missing"):
        VectorStore.open(tmp_path / "v")
    encode(data=toy_beir, model=static_folder, output=tmp_path / "v", shard="2/3")
    assert len(VectorStore.open(tmp_path / "v").ids) == 60
    assert parse_shard(None) is None
    for wrong in ("0/4", "5/4", "1", "a/b", "1/0"):
        with pytest.raises(ConfigError, match="expected i/n"):
            parse_shard(wrong)


def test_queries_can_be_encoded(static_folder, toy_beir, toy, tmp_path):
    store = encode(data=toy_beir, model=static_folder, output=tmp_path / "q", side="queries", split="test")
    queries = toy.queries("test")
    assert store.ids == list(queries)
    expected = DualEncoder.from_pretrained(static_folder).encode_queries(queries)
    assert np.abs(store.vectors(0) - expected).max() < 1e-6
    with pytest.raises(ConfigError, match="side is 'labels'"):
        encode(data=toy_beir, model=static_folder, output=tmp_path / "x", side="labels")


def test_other_settings_are_refused_and_name_themselves(encoder, corpus, tmp_path, bert_folder):
    encode_corpus(encoder, corpus, tmp_path / "v")
    with pytest.raises(ConfigError, match="doc_max_length was 48, is 9"):
        encode_corpus(DualEncoder.from_pretrained(bert_folder, doc_max_length=9), corpus, tmp_path / "v")
    with pytest.raises(OutputExistsError):
        encode_corpus(encoder, corpus, tmp_path / "v", resume=False)
    store = encode_corpus(
        DualEncoder.from_pretrained(bert_folder, doc_max_length=9), corpus, tmp_path / "v", overwrite=True
    )
    assert store.manifest["doc_max_length"] == 9
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError):
            encode_corpus(encoder, corpus, tmp_path / "other", overwrite=overwrite)
    assert (tmp_path / "other" / "letter.txt").read_text() == "mine"


def test_damaged_stores_are_named(encoder, corpus, tmp_path):
    with pytest.raises(MissingInputError, match="not a directory of vectors"):
        VectorStore.open(tmp_path)
    encode_corpus(encoder, corpus, tmp_path / "v", shard_size=60)
    file = tmp_path / "v" / "vectors-00001.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-64])
    with pytest.raises(DataError, match=r"vectors-00001.npy is damaged or cut short"):
        VectorStore.open(tmp_path / "v")
    np.save(file, np.zeros((3, 32), np.float32))
    with pytest.raises(DataError, match=r"expected float32 \(42, 32\)"):
        VectorStore.open(tmp_path / "v")
    file.write_bytes(whole)
    manifest = json.loads((tmp_path / "v" / "manifest.json").read_text())
    (tmp_path / "v" / "manifest.json").write_text(json.dumps({**manifest, "format_version": 7}))
    with pytest.raises(DataError, match="format version 7"):
        VectorStore.open(tmp_path / "v")


def test_processes_give_what_one_gives(static_folder, corpus, tmp_path):
    encoder = DualEncoder.from_pretrained(static_folder)
    encode_corpus(encoder, corpus, tmp_path / "one", shard_size=30)
    encode_corpus(encoder, corpus, tmp_path / "two", shard_size=30, processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def _die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_raises_in_the_parent(static_folder, corpus, tmp_path, monkeypatch):
    # user-reports C.66
    monkeypatch.setattr(workers, "_work", _die)
    with pytest.raises(ShortlistError, match=r"worker process ended with exit code -9 while encoding shard"):
        encode_corpus(DualEncoder.from_pretrained(static_folder), corpus, tmp_path / "v", shard_size=30, processes=2)


def test_a_failing_worker_tells_why(static_folder, corpus, tmp_path):
    # user-reports C.66: here the corpus that the worker opens is gone.
    encoder = DualEncoder.from_pretrained(static_folder)
    with torch.no_grad():
        encoder.query_tower.embedding.weight[7] = float("nan")
    with pytest.raises(ShortlistError, match="a worker process failed while encoding shard .*NonFiniteError"):
        encode_corpus(
            encoder, Corpus.from_documents({f"d{n}": "the a of on" for n in range(9)}), tmp_path / "v", shard_size=3,
            processes=2,
        )  # fmt: skip


def test_a_vector_that_is_not_finite_names_text_layer_and_cause(bert_folder):
    # user-reports B.51
    encoder = DualEncoder.from_pretrained(bert_folder)
    layer = encoder.query_tower.backbone.encoder.layer[1].intermediate.dense

    def overflow(module, inputs, output):
        return torch.where(output == output.max(), torch.inf, output)

    handle = layer.register_forward_hook(overflow)
    with pytest.raises(NonFiniteError, match=r"document 'b' has a NaN .*layer.*intermediate.dense .*float32 on cpu"):
        encoder.encode_documents({"b": "the cat sat on the mat"})
    handle.remove()
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"the weight .*layer.1.intermediate.dense.weight of the model is not"):
        encoder.encode_documents(["dog"])


def test_out_of_memory_halves_the_batch(encoder, texts, monkeypatch, caplog):
    # user-reports H.175
    expected = encoder.encode_documents(texts)
    tower = type(encoder.query_tower)
    plain, sizes = tower.vectors, []

    def scarce(self, features, **options):
        sizes.append(features["input_ids"].numel())
        if sizes[-1] > 60:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(self, features, **options)

    monkeypatch.setattr(tower, "vectors", scarce)
    assert np.abs(encoder.encode_documents(texts) - expected).max() < 1e-5
    assert "batch_tokens lowered" in caplog.text
    monkeypatch.setattr(tower, "vectors", lambda *a, **k: scarce(a[0], {"input_ids": torch.zeros(1, 99)}))
    with pytest.raises(ShortlistError, match="not enough memory on cpu for one text of"):
        encoder.encode_documents(texts)


def test_padding_is_no_more_than_the_lengths_force(encoder):
    forward = Forward(encoder, "document", batch_tokens=128)
    tokens = forward.tokens(["cat " * (1 + n * 13 % 40) for n in range(200)])
    batches = list(forward._batches(tokens))
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    padded = sum(len(rows) * int(tokens.lengths[rows].max()) for rows in batches)
    assert all(len(rows) == 1 or len(rows) * tokens.lengths[rows].max() <= 128 for rows in batches)
    assert padded <= 1.08 * tokens.lengths.sum()


def test_the_background_thread_hands_on_errors_and_stops():
    def numbers():
        yield 1
        raise DataError("line 2 is broken")

    seen = []
    with pytest.raises(DataError, match="line 2"):
        for value in ahead(numbers()):
            seen.append(value)
    assert seen == [1]
    made = []

    def endless():
        while True:
            made.append(1)
            yield 1

    stream = ahead(endless(), depth=2)
    next(stream)
    stream.close()
    count = len(made)
    time.sleep(0.3)
    assert len(made) == count <= 5


def test_progress_bar_has_a_total_and_is_off_when_quiet(monkeypatch, capsys):
    with engine.progress_bar(10, "documents") as bar:
        assert bar.disable
    with engine.progress_bar(10, "documents", True, initial=4) as bar:
        assert bar.total == 10 and bar.n == 4
    assert "encode documents" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory from /proc")
def test_memory_does_not_grow_with_the_number_of_texts(static_folder):
    # user-reports C.63, C.65
    def anonymous():
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    encoder = DualEncoder.from_pretrained(static_folder)
    stream = encoder.encode_stream((f"d{n}", f"cat number {n} on the mat " * 4) for n in range(60_000))
    for _ in range(4):
        next(stream)
    before = anonymous()
    assert sum(len(ids) for ids, _ in stream) == 60_000 - 4 * engine.WINDOW
    assert anonymous() - before < 60
