"""An index with awkward ids and documents for the export tests, and what LOAD.md shows, cut out and run."""

import hashlib
import json
import re

import numpy as np

from shortlist import ExactIndex, FaissIndex
from shortlist.data import Document

DIM = 24
AWKWARD = [
    "d 1", " leading", "trailing ", "quote'single", 'quote"double', "back\\slash", "\\N", "\\.", "tab\there",
    "new\nline", "carriage\rreturn", "comma,semicolon;", "$name ${x} %s {0}", "'; DROP TABLE documents; --", "NULL",
    "0", "-1", "123e4567-e89b-12d3-a456-426614174000", "ä ö ü ß", "日本語の文書", "🙂👩\u200d👩\u200d👧", "שלום عليكم",
    "e\u0301 and é", "\u2028line separator", "http://example.org/a?b=c&d=e#f", "a/b/c", "<b>&amp;</b>", "x" * 200,
    "ж" * 200, "日" * 200, "\x01\x7f control",
]  # fmt: skip
TEXTS = [
    "",
    "plain text",
    "tab\tand\nline\r\nbreaks \\ \\N \\.",
    "quotes \" ' ` $$ $1",
    "🙂 ünïcode \u2028 \x0b\x0c\x08",
]
LONG = "日本 text " * 4_000


def sample(*, metric="ip", count=300, documents=True, seed=0):
    """An index of `count` documents, of which three are removed again and one is replaced."""
    random = np.random.default_rng(seed)
    ids = [*AWKWARD, *(f"doc {number}" for number in range(count - len(AWKWARD)))]
    vectors = random.standard_normal((count, DIM)).astype(np.float32)
    vectors[7] /= 1e6  # small numbers are written with exponents
    index = ExactIndex(DIM) if metric == "ip" else FaissIndex(DIM, metric=metric)
    index.model = {"name": "some/model", "fingerprint": "f00d" * 8, "path": "../model"}
    stored = [document(id, row) for row, id in enumerate(ids)] if documents else None
    index.add(ids, vectors, documents=stored)
    index.remove(["doc 3", "d 1", "日本語の文書"])
    index.add(["doc 9"], 1.5 * vectors[:1], replace=True, documents=None if stored is None else [document("doc 9", 1)])
    return index


def document(id, row):
    """Documents with empty titles, missing fields, and fields of every type."""
    metadata = {}
    if row % 3:
        metadata["year"] = 1990 + row % 40
    if row % 4 == 1:
        metadata["tags"] = ["a", "b c", 'quote"d', "tab\t"][: row % 5]
    if row % 5 == 2:
        metadata |= {"draft": bool(row % 2), "price": row / 7, "lang": ["en", "日本"][row % 2]}
    title = "" if row % 4 == 0 else f"Title {row} of {id}"
    return Document(id, title, TEXTS[row % len(TEXTS)] if row != 11 else LONG, metadata or None)


def queries(count=50):
    return np.random.default_rng(99).standard_normal((count, DIM)).astype(np.float32)


def expected(index):
    """`{id: (title, text, fields)}` of what an export must hold, in order."""
    found = {}
    for id in index.ids:
        stored = index.document(id)
        found[id] = None if stored is None else (stored["title"], stored["text"], stored.get("metadata") or {})
    return found


def guide(directory):
    return (directory / "LOAD.md").read_text("utf-8")


def shown(directory, language="python", after="## Load"):
    """The code blocks of LOAD.md, as one text."""
    text = guide(directory)
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text[text.index(after) :], re.DOTALL | re.MULTILINE))


def run_shown(directory, monkeypatch, *changes):
    """Run the Python of LOAD.md in the export's directory, with its server's address replaced; returns its names."""
    code = shown(directory)
    for old, new in changes:
        assert code.count(old) == 1, f"LOAD.md should name {old} once"
        code = code.replace(old, new)
    monkeypatch.chdir(directory)
    names = {"__name__": "shown"}
    exec(compile(code, str(directory / "LOAD.md"), "exec"), names)
    return names


def check_search(search, index, *, k=10, tolerance=1e-4):
    """`search(vector, k)` gives the ids of `index` in its order, with its scores, for 50 queries."""
    asked = queries()
    for vector, ours in zip(asked, index.search(asked, k), strict=True):
        theirs = search(vector, k)
        assert [id for id, _ in theirs] == [id for id, _ in ours]
        np.testing.assert_allclose([s for _, s in theirs], [s for _, s in ours], rtol=0, atol=tolerance)


def check_manifest(directory, index):
    manifest = json.loads((directory / "manifest.json").read_text("utf-8"))
    assert (manifest["count"], manifest["dim"], manifest["metric"]) == (len(index), index.dim, index.metric)
    assert manifest["model"] == {"name": "some/model", "fingerprint": "f00d" * 8}
    files = {file.name for file in directory.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == files and "LOAD.md" in files
    for name, entry in manifest["files"].items():
        content = (directory / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return manifest
