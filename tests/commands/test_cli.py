"""The command line end to end: the verbs in sequence, and bad input as one sentence with its exit code."""

import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest

import shortlist
from shortlist.cli import main


def run(*arguments) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def search_all(index, data, output) -> None:
    assert run("search", "--index", index, "--data", data, "--split", "test", "-o", output) == 0


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_static, toy_folder):
    """Data, an index over it, and a run, made by the command line."""
    folder = tmp_path_factory.mktemp("built")
    data = shutil.copytree(toy_folder / "beir", folder / "data")
    assert run("index", "--model", tiny_static, "--data", data, "-o", folder / "index") == 0
    assert (
        run("search", "--index", folder / "index", "--data", data, "--split", "test", "-o", folder / "out.run.gz") == 0
    )
    return folder


def test_index_search_evaluate_in_sequence(built, capsys):
    code = run("evaluate", "--data", built / "data", "--split", "test", built / "out.run.gz", "nDCG@10", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert code == 0 and answer["runs"][0]["name"] == "out"
    assert 0 < answer["runs"][0]["mean"]["nDCG@10"] <= 1


def test_encode_then_index_from_vectors_gives_the_same_results(built, tiny_static, tmp_path, capsys):
    data, vectors, index = built / "data", tmp_path / "vectors", tmp_path / "index"
    assert run("encode", "--model", tiny_static, "--data", data, "-o", vectors) == 0
    assert run("index", "--model", tiny_static, "--data", data, "--vectors", vectors, "-o", index) == 0
    search_all(index, data, tmp_path / "out.run.gz")
    assert (tmp_path / "out.run.gz").read_bytes() == (built / "out.run.gz").read_bytes()


def broken_line(data):
    with open(data / "corpus.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"_id": "broken", "text": \n')


def repeated_id(data):
    lines = (data / "corpus.jsonl").read_text(encoding="utf-8").rstrip("\n")
    (data / "corpus.jsonl").write_text(lines + "\n" + lines.split("\n")[0] + "\n", encoding="utf-8")


def latin_1(data):
    with open(data / "corpus.jsonl", "ab") as handle:
        handle.write('{"_id": "latin", "text": "café"}\n'.encode("latin-1"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (broken_line, ["corpus.jsonl", "line 61", "JSON"]),
        (repeated_id, ["corpus.jsonl", "61", "twice"]),
        (latin_1, ["corpus.jsonl", "line 61", "UTF-8"]),
    ],
)
def test_damaged_collections_are_refused_by_file_and_line(damage, said, built, tiny_static, tmp_path, capsys):
    # user-reports A: each names the thing and the remedy; nothing is written
    data = shutil.copytree(built / "data", tmp_path / "data")
    damage(data)
    capsys.readouterr()
    assert run("index", "--model", tiny_static, "--data", data, "-o", tmp_path / "index") == 5
    message = capsys.readouterr().err
    for word in said:
        assert word in message
    assert not (tmp_path / "index").exists()


def test_bad_lines_can_be_skipped_and_are_counted(built, tiny_static, tmp_path, capsys):
    data = shutil.copytree(built / "data", tmp_path / "data")
    broken_line(data)
    arguments = ("--model", tiny_static, "--data", data, "-o", tmp_path / "index", "--on-error", "skip")
    assert run("index", *arguments) == 0
    assert "1" in capsys.readouterr().err and (tmp_path / "index").exists()


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_bad_qrels_and_runs_are_refused(built, tmp_path, capsys):
    good = write(tmp_path / "good.qrels", "q1 0 d1 1\n")
    cases = {
        "empty": ("evaluate", write(tmp_path / "empty.qrels", ""), built / "out.run.gz"),
        "five": ("evaluate", good, write(tmp_path / "five.run", "q1 Q0 d1 1 0.5\n")),
        "nan": ("evaluate", good, write(tmp_path / "nan.run", "q1 Q0 d1 1 nan tag\n")),
    }
    for name, arguments in cases.items():
        assert run(*arguments) == 5, name
        message = capsys.readouterr().err
        assert message.startswith("error: ") and f"{name}." in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["search", "--index", "INDEX", "--data", "DATA", "-k", "0", "-o", "NEW.run"], 2, ["k is 0", "at least 1"]),
        (["search", "--index", "NOWHERE", "--data", "DATA", "-o", "NEW.run"], 4, ["NOWHERE"]),
        (["search", "--index", "DATA", "--data", "DATA", "-o", "NEW.run"], 5, ["not an index"]),
        (["search", "--index", "INDEX", "--data", "DATA", "-o", "RUN"], 2, ["exists", "--overwrite"]),
        (["search", "--index", "INDEX", "--data", "DATA", "--split", "tset", "-o", "NEW.run"], 4, ["tset", "test"]),
        (["index", "--data", "DATA", "-o", "INDEX"], 2, ["exists", "--overwrite"]),
        (["index", "--data", "NOWHERE", "-o", "NEW"], 4, ["NOWHERE"]),
        (["evaluate", "--data", "DATA", "NOWHERE.run"], 4, ["NOWHERE.run"]),
        (["evaluate", "--data", "DATA", "RUN", "nDGC@10"], 2, ["nDGC@10", "nDCG@10"]),
        (["train", "scifact-dual-encoder", "trainig.seed=1", "-o", "NEW"], 2, ["trainig", "training"]),
        (["train", "scifact-dual-encodr", "-o", "NEW"], 2, ["scifact-dual-encoder"]),
        (["train", "scifact-dual-encoder", "data.path=NOWHERE", "-o", "NEW"], 4, ["NOWHERE"]),
        (["train", "scifact-dual-encoder"], 2, ["-o OUT"]),
        (["data", "info", "NOWHERE"], 4, ["NOWHERE"]),
    ],
)
def test_mistakes_are_one_sentence_with_an_exit_code(arguments, code, said, built, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"INDEX": built / "index", "DATA": built / "data", "RUN": built / "out.run.gz"}
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    capsys.readouterr()
    assert run(*(places.get(argument, argument) for argument in arguments)) == code
    message = capsys.readouterr().err
    assert message.splitlines()[-1].startswith("error: ") and "Traceback" not in message
    for word in said:
        assert word in message, message
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before
    assert list(tmp_path.iterdir()) == []


def test_an_index_from_another_model_is_refused(built, tiny_transformer, tmp_path, capsys):
    # user-reports C.70
    arguments = ("--index", built / "index", "--model", tiny_transformer, "--data", built / "data")
    assert run("search", *arguments, "-o", tmp_path / "new.run") == 5
    assert "fingerprint" in capsys.readouterr().err


def test_a_truncated_index_file_is_refused_by_name(built, tmp_path, capsys):
    index = shutil.copytree(built / "index", tmp_path / "index")
    file = next(index.rglob("vectors-*.npy"))
    file.write_bytes(file.read_bytes()[:-8])
    assert run("search", "--index", index, "--data", built / "data", "-o", tmp_path / "new.run") == 5
    assert file.name in capsys.readouterr().err


def test_version_help_and_usage():
    def shell(*arguments):
        return subprocess.run([sys.executable, "-m", "shortlist.cli", *arguments], capture_output=True, text=True)

    assert shell("--version").stdout.strip() == f"shortlist {shortlist.__version__}"
    for verb in ("train", "encode", "index", "search", "evaluate", "demo", "doctor", "data"):
        assert verb in shell("--help").stdout
    unknown = shell("serach")
    assert unknown.returncode == 2 and "serach" in unknown.stderr


def test_doctor_reports_as_json(capsys):
    # user-reports H.165: says what FAISS can do and why
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["shortlist"] == shortlist.__version__
    assert {"available", "gpu", "reason"} <= set(report["faiss"]) and isinstance(report["attention"], list)


def test_doctor_prints_a_table(capsys):
    assert run("doctor") == 0
    assert "devices" in capsys.readouterr().out


def test_a_full_disk_is_a_sentence(built, monkeypatch, capsys, tmp_path):
    import errno

    from shortlist.commands import search

    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "new.run"))
    inside_a_library = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    for error in (full, inside_a_library):
        monkeypatch.setattr(search, "write_run", Mock(side_effect=error))
        code = run("search", "--index", built / "index", "--data", built / "data", "-o", tmp_path / "new.run")
        message = capsys.readouterr().err.splitlines()[-1]
        assert code == 1 and message.startswith("error: ") and "No space left on device" in message
    monkeypatch.setattr(search, "write_run", Mock(side_effect=RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        run("search", "--index", built / "index", "--data", built / "data", "-o", tmp_path / "new.run")
