"""The Arrow cache: complete or absent, shared safely, rebuilt when a source changes, replaced when unwritable."""

import json
import multiprocessing
import os
import shutil
import signal
import time

import pytest

from shortlist.data import load_collection
from shortlist.data.cache import cached_directory, is_complete, source_key


def corpus_file(tmp_path, number=20):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"_id": f"d{i}", "text": f"t{i}"}) + "\n" for i in range(number)))
    return path


def entries(cache):
    return [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")]


def test_second_opening_uses_the_first_and_a_change_rebuilds(tmp_path):
    source, cache = corpus_file(tmp_path), tmp_path / "cache"
    first = load_collection(source, cache_dir=cache).corpus
    written = (first.directory / "corpus.arrow").stat().st_mtime_ns
    second = load_collection(source, cache_dir=cache).corpus
    assert second.directory == first.directory and (second.directory / "corpus.arrow").stat().st_mtime_ns == written
    source.write_text(source.read_text().replace("t7", "new"))
    assert load_collection(source, cache_dir=cache).corpus["d7"].text == "new"
    assert len(entries(cache)) == 2


def test_key_depends_on_files_and_options(tmp_path):
    source = corpus_file(tmp_path)
    key = source_key([source], on_empty="keep")
    assert key == source_key([source], on_empty="keep") != source_key([source], on_empty="skip")
    os.utime(source, ns=(1, 1))
    assert key != source_key([source], on_empty="keep")


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(path):
        (path / "half").write_text("x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        cached_directory("key", build, cache_dir=tmp_path)
    assert not entries(tmp_path) and not list(tmp_path.glob(".key.tmp.*"))


def _build_slowly(cache):
    def build(path):
        (path / "half").write_text("half")
        time.sleep(60)

    cached_directory("key", build, cache_dir=cache)


def test_a_killed_build_is_never_opened_and_its_rest_is_removed(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(tmp_path,))
    process.start()
    while not list(tmp_path.glob(".key.tmp.*/half")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(tmp_path.glob(".key.tmp.*"))
    entry = cached_directory("key", lambda path: (path / "whole").write_text("whole") and None, cache_dir=tmp_path)
    assert (entry.path / "whole").read_text() == "whole" and not (entry.path / "half").exists()
    assert not list(tmp_path.glob(".key.tmp.*"))


def _open(source, cache, queue):
    corpus = load_collection(source, cache_dir=cache).corpus
    queue.put((len(corpus), corpus["d13"].text, str(corpus.directory)))


def test_several_processes_build_at_once(tmp_path):
    source, cache = corpus_file(tmp_path, 3000), tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open, args=(source, cache, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    results = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert results == {(3000, "t13", str(entries(cache)[0]))}
    assert len(entries(cache)) == 1


def test_losing_the_race_takes_what_the_winner_wrote(tmp_path, monkeypatch):
    def build(path):
        (path / "a").write_text("mine")
        winner = tmp_path / "key"
        winner.mkdir()
        (winner / "a").write_text("other")
        (winner / "manifest.json").write_text('{"sizes": {"a": 5}}')

    entry = cached_directory("key", build, cache_dir=tmp_path)
    assert entry.path == tmp_path / "key" and (entry.path / "a").read_text() == "other"


def test_a_damaged_entry_is_rebuilt(tmp_path):
    source, cache = corpus_file(tmp_path), tmp_path / "cache"
    directory = load_collection(source, cache_dir=cache).corpus.directory
    arrow = directory / "corpus.arrow"
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert not is_complete(directory)
    assert load_collection(source, cache_dir=cache).corpus["d3"].text == "t3"


def test_a_cache_that_cannot_be_written_is_replaced_with_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    corpus = load_collection(corpus_file(tmp_path), cache_dir=blocked / "cache").corpus
    assert corpus["d3"].text == "t3" and not str(corpus.directory).startswith(str(blocked))
    assert "cannot be written" in caplog.text and "SHORTLIST_CACHE" in caplog.text


def test_checksums_are_of_the_source_files_and_remembered(toy_beir, toy, tmp_path, monkeypatch):  # user-reports A.14
    import hashlib

    expected = {
        str(path.relative_to(toy_beir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in toy_beir.rglob("*.*sv")
    }
    sums = toy.checksums()
    assert {name: value for name, value in sums.items() if name.startswith("qrels/")} == expected
    assert set(sums) == {"corpus.jsonl", "queries.jsonl", *expected}
    monkeypatch.setattr("shortlist.files.sha256", lambda path: pytest.fail("read again"))
    assert toy.checksums() == sums


def test_an_entry_has_the_permissions_of_any_new_folder(tmp_path):
    entry = cached_directory("key", lambda path: (path / "x").touch() or None, cache_dir=tmp_path)
    (tmp_path / "other").mkdir()
    assert entry.path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_entry_that_can_neither_be_read_nor_replaced_is_left_and_a_copy_used(tmp_path, monkeypatch, caplog):
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "x").write_text("theirs")
    remove = shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **options: None if path == tmp_path / "key" else remove(path, **options)
    )
    entry = cached_directory("key", lambda path: (path / "x").write_text("ours") and None, cache_dir=tmp_path)
    assert (entry.path / "x").read_text() == "ours" and "temporary copy" in caplog.text
    path = entry.path
    del entry
    assert not path.exists() and (tmp_path / "key" / "x").read_text() == "theirs"
