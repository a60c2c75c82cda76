"""`shortlist export`: from a built index to files that load, and one sentence where something is wrong."""

import json

import numpy as np
import pytest

from shortlist.cli import main
from shortlist.indexes import open_index


@pytest.fixture
def index(toy_beir, tiny_static, tmp_path):
    run("index", "--data", str(toy_beir), "--model", str(tiny_static), "-o", str(tmp_path / "index"))
    return tmp_path / "index"


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return stopped.value.code


def test_an_index_is_exported_with_its_texts(index, tmp_path, capsys):
    assert run("export", str(index), "--to", "jsonl", "-o", str(tmp_path / "out"), "--gzip") == 0
    output = capsys.readouterr()
    assert output.out == "" and "LOAD.md says how to load them" in output.err
    opened = open_index(index)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["count"] == len(opened) and manifest["model"]["fingerprint"] == opened.model["fingerprint"]
    assert "path" not in manifest["model"] and str(tmp_path) not in json.dumps(manifest)
    assert str(tmp_path) not in (tmp_path / "out/LOAD.md").read_text()


def test_the_query_that_the_guide_shows_runs(index, tiny_static, tmp_path, monkeypatch):
    import re

    assert run("export", str(index), "--to", "npy", "-o", str(tmp_path / "out"), "--name", "toy") == 0
    text = (tmp_path / "out/LOAD.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The folder of the model goes by its name in the index, so that its path is not told to others.
    code = "\n".join([*blocks, "answer = search(vector, 3)"]).replace('"model"', repr(str(tiny_static)))
    monkeypatch.chdir(tmp_path / "out")
    names = {}
    exec(code, names)
    ours = open_index(index).search(names["vector"][None], 3)[0]
    assert [id for id, _ in names["answer"]] == [id for id, _ in ours]
    np.testing.assert_allclose([s for _, s in names["answer"]], [s for _, s in ours], atol=1e-5)


def test_removed_documents_are_absent(index, tmp_path):
    opened = open_index(index)
    gone = list(opened.ids)[1]
    opened.remove([gone])
    opened.commit()
    assert run("export", str(index), "--to", "npy", "-o", str(tmp_path / "out")) == 0
    ids = [json.loads(line) for line in (tmp_path / "out/ids.jsonl").read_text("utf-8").splitlines()]
    assert gone not in ids and len(ids) == len(opened)


def test_a_bm25_index_has_no_vectors(toy, tmp_path, capsys):
    from shortlist import LexicalRetriever

    LexicalRetriever.build(toy.corpus).save(tmp_path / "bm25")
    capsys.readouterr()
    assert run("export", str(tmp_path / "bm25"), "--to", "npy", "-o", str(tmp_path / "out")) == 2
    assert "is a BM25 index: it holds weights of terms, no vectors" in capsys.readouterr().err


def test_mistakes_are_one_sentence(index, tmp_path, capsys):
    def error(*arguments):
        code = run("export", *arguments)
        (line,) = capsys.readouterr().err.strip().split("\n")
        return code, line

    out = str(tmp_path / "out")
    capsys.readouterr()
    code, line = error(str(index), "--to", "lancdb", "-o", out)
    assert code == 2 and "did you mean 'lancedb'" in line and "pgvector" in line
    code, line = error(str(tmp_path / "nowhere"), "--to", "npy", "-o", out)
    assert code == 4 and "there is no index" in line
    (tmp_path / "out").mkdir()
    (tmp_path / "out/kept").touch()
    code, line = error(str(index), "--to", "npy", "-o", out)
    assert code == 2 and "exists already" in line
    code, line = error(str(index), "--to", "npy", "-o", str(index), "--overwrite")
    assert code == 2 and "one within the other" in line
    code, line = error(str(index), "--to", "npy", "-o", str(tmp_path), "--overwrite")
    assert code == 2 and "one within the other" in line
    manifest = json.loads((index / "manifest.json").read_text())
    (index / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    code, line = error(str(index), "--to", "npy", "-o", str(tmp_path / "new"))
    assert code == 5 and "format version 99" in line and "update shortlist" in line
    assert not (tmp_path / "new").exists()


def test_the_help_names_every_system(capsys):
    from shortlist.indexes.export import TARGETS

    assert run("export", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in TARGETS)
