"""The README's code and commands run as printed (user-reports H.171, H.174)."""

import logging
import re
import shlex
from pathlib import Path

import pytest

import shortlist
from shortlist.cli import main
from shortlist.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
SCIFACT = Path(shortlist.__file__).parent / "assets" / "scifact"


def blocks(text: str, language: str = "") -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.S | re.M)
    return [block for name, block in fenced if name == language]


def commands(text: str) -> list[list[str]]:
    """The `shortlist` lines of the plain code blocks, comments off, brackets of optional parts off."""
    lines = [line.split("  #")[0].strip() for block in blocks(text) for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("shortlist ")]


def run(arguments: list[str]) -> int:
    logger = logging.getLogger("shortlist")
    kept = logger.handlers[:], logger.propagate, logger.level
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:  # the command line sets logging up, which other tests must not see
        logger.handlers[:], logger.propagate = kept[:2]
        logger.setLevel(kept[2])
    return 0


def test_the_python_of_the_readme_runs(capsys):
    code = "\n".join(blocks(README, "python")).replace("path/to/scifact", SCIFACT.as_posix())
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "nDCG@10" in printed and "R@100" in printed


@pytest.fixture
def working_folder(toy_beir, toy_xc, tmp_path, monkeypatch):
    """An empty folder to work in, with the files that the pages start from: qrels.tsv, train.tsv, test.tsv."""
    from shortlist import load_collection

    monkeypatch.chdir(tmp_path)
    (tmp_path / "qrels.tsv").write_bytes((toy_beir / "qrels" / "test.tsv").read_bytes())
    collection = load_collection(toy_xc)
    names = {document.id: document.title for document in collection.corpus}
    for split in ("train", "test"):
        qrels, texts = collection.qrels(split), collection.queries(split)
        lines = [f"{texts[point]}\t{'; '.join(names[label] for label in qrels[point])}\n" for point in qrels]
        (tmp_path / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_python_of_the_guides_runs(page, working_folder):
    code = "\n".join(blocks(page.read_text(encoding="utf-8"), "python"))
    assert code or "```python" not in page.read_text(encoding="utf-8")
    exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_configurations_of_the_guides_load(page, tmp_path):
    for number, text in enumerate(blocks(page.read_text(encoding="utf-8"), "yaml")):
        (tmp_path / f"{number}.yaml").write_text(text, encoding="utf-8")
        load_config(tmp_path / f"{number}.yaml")


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.name)
def test_the_commands_of_the_documentation_run(page, toy_beir, toy_xc, tiny_transformer, working_folder, capsys):
    # user-reports A.26: from a file of texts and label names to measures, as the extreme-classification page has it
    places = {"DIR": str(toy_beir), "XC": str(toy_xc), "MODEL": str(tiny_transformer)}
    if "folder.mkdir" in page.read_text(encoding="utf-8"):  # the page's commands work on what its Python wrote
        exec(compile("\n".join(blocks(page.read_text(encoding="utf-8"), "python")), page.name, "exec"), {})
    found = commands(page.read_text(encoding="utf-8"))
    assert len(found) == len(re.findall(r"^shortlist ", page.read_text(encoding="utf-8"), flags=re.M)) > 0
    for arguments in found:
        if arguments[:2] == ["data", "download"]:
            continue  # tests/data/test_download.py runs it against a local server
        words = [re.sub(r"\b(DIR|XC|MODEL)\b", lambda match: places[match.group()], word) for word in arguments]
        assert run(words) == 0, f"{page.name}: shortlist {shlex.join(words)}\n{capsys.readouterr().err}"


def test_the_readme_shows_the_two_commands():
    assert "make demo" in README and "make test" in README


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
