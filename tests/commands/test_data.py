"""`shortlist data …` as it is typed: what goes to stdout, and the exit codes."""

import json

import pytest

from shortlist.cli import main


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
        raise SystemExit(0)  # a library call returns where the console script would exit with 0
    return ended.value.code or 0


def test_info_as_json_goes_to_stdout_alone(toy_xc, capsys):
    assert run("data", "info", toy_xc, "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"]["count"] == 12


def test_convert_refuses_an_output_that_exists(toy_beir, tmp_path, capsys):
    assert run("data", "convert", toy_beir, tmp_path / "out", "--to", "beir") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert run("data", "convert", toy_beir, tmp_path / "out") == 2
    assert "exists already" in capsys.readouterr().err
    assert run("data", "convert", toy_beir, tmp_path / "out", "--overwrite") == 0


@pytest.mark.parametrize(
    "arguments, code, sentence",
    [
        (("download", "scifcat"), 2, "nearest: scifact"),
        (("download", "robust04"), 4, "no public mirror"),
        (("download", "scifact", "--url", "http://127.0.0.1:9/scifact.zip"), 4, "no network"),
        (("info", "nowhere-at-all"), 4, "nowhere-at-all does not exist"),
        (("convert", "nowhere-at-all", "out"), 4, "does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_with_its_exit_code(
    arguments, code, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run("data", *arguments) == code
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == ""
