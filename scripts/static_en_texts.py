"""Readers of the texts that `make_static_en.py` learns from: one list of strings for each source, in a fixed order.

Every reader takes a path and returns texts as a search engine would meet them: short ones (titles, terms, questions)
and longer ones (definitions, abstracts, descriptions). What a path holds is told from its content.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sqlite3
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

#: Words in a run that two texts must share for the one to count as a copy of a part of the other.
OVERLAP_WORDS = 8

#: Ontologies read from the wheel of cellxgene-ontology-guide, with the most terms taken from each.
ONTOLOGIES = {
    "MONDO": 30_000,
    "UBERON": 15_000,
    "CL": 4_000,
    "EFO": 8_000,
    "PATO": 2_000,
    "CHEBI": 10_000,
    "FBbt": 2_000,
}


#: Label, definition, synonyms and labels of the parents of a term of an ontology.
Term = tuple[str, str, list[str], list[str]]


def read_texts(path: Path, *, seed: int = 0) -> list[str]:
    """The texts of one source, without repeats; raises ValueError for a path that no reader knows."""
    for accepts, reader in READERS:
        if accepts(path):
            return list(dict.fromkeys(text for text in (" ".join(t.split()) for t in reader(path, seed)) if text))
    raise ValueError(f"{path}: not a source of text that this script reads; see READERS in {Path(__file__).name}.")


def _lines(path: Path) -> Iterator[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _beir(path: Path, seed: int) -> Iterator[str]:
    for row in _lines(path / "corpus.jsonl.gz"):
        yield f"{row['title']} {row['text']}"
    for row in _lines(path / "queries.jsonl.gz"):
        yield row["text"]


def _extreme(path: Path, seed: int) -> Iterator[str]:
    for name in ("trn", "tst", "lbl"):
        for row in _lines(path / f"{name}.json.gz"):
            yield f"{row['title']} {row['content']}"


def _wordnet(path: Path, seed: int) -> Iterator[str]:
    """Lemmas and gloss of every verb, adjective and adverb (nouns come from the BEIR folder made of data.noun)."""
    for part in ("verb", "adj", "adv"):
        for line in (path / f"data.{part}").read_text(encoding="utf-8", errors="replace").splitlines():
            if not line.startswith("  ") and "|" in line:
                fields, gloss = line.split("|", 1)
                words = fields.split()
                lemmas = [re.sub(r"\(.*\)$", "", words[4 + 2 * i]) for i in range(int(words[3], 16))]
                yield f"{', '.join(lemmas).replace('_', ' ')} {gloss}"


def _term_texts(terms: list[Term], rng: random.Random, long_every: int) -> Iterator[str]:
    """Texts of ontology terms, label with definition, and some names alone.

    Every `long_every`-th parent also gives one long text: its own definition followed by those of its children, so that
    documents of a few hundred tokens about one subject are seen.
    """
    children: dict[str, list[int]] = {}
    definition_of = {label: definition for label, definition, _, _ in terms}
    for number, (label, definition, synonyms, parents) in enumerate(terms):
        if definition:
            yield f"{label} {definition}" if number % 3 else definition
        if number % 3 == 0 or not definition:
            yield label
        if synonyms and number % 2 == 0:
            yield rng.choice(synonyms)
        for parent in parents:
            children.setdefault(parent, []).append(number)
    for count, parent in enumerate(sorted(children)):
        if count % long_every == 0 and len(children[parent]) >= 3:
            numbers = rng.sample(children[parent], k=min(len(children[parent]), 8))
            pieces = [f"{parent} {definition_of.get(parent, '')}"]
            for place, (name, text, _, _) in enumerate(terms[number] for number in numbers):
                pieces.append(f"{name}: {text}" if place % 2 else text or name)
            yield " ".join(pieces)


def _cellxgene(path: Path, seed: int) -> Iterator[str]:
    import zstandard

    rng = random.Random(seed)
    with zipfile.ZipFile(path) as wheel:
        names = sorted(name for name in wheel.namelist() if name.endswith(".json.zst"))
        for ontology, limit in ONTOLOGIES.items():
            newest = [name for name in names if f"/{ontology}-ontology-" in name][-1]
            raw = zstandard.ZstdDecompressor().decompress(wheel.read(newest), max_output_size=1 << 31)
            data = json.loads(raw)
            labels = {key: value.get("label") or "" for key, value in data.items()}
            terms = []
            for key, value in data.items():
                label, definition = labels[key], value.get("description") or ""
                # Chemical names in full notation are letters and digits, not words: of no use to a text encoder.
                if value.get("deprecated") or not label or len(re.findall(r"[^a-zA-Z ,'\-]", label)) > 4:
                    continue
                if not definition and ontology not in ("MONDO", "UBERON"):
                    continue
                parents = [labels.get(p, "") for p, distance in value.get("ancestors", {}).items() if distance == 1]
                terms.append((label, definition, value.get("synonyms") or [], [p for p in parents if p]))
            if len(terms) > limit:
                terms = [terms[i] for i in sorted(rng.sample(range(len(terms)), limit))]
            yield from _term_texts(terms, rng, long_every=2)


def _gene_ontology(path: Path, seed: int) -> Iterator[str]:
    """Term names and definitions of the Gene Ontology; the many "regulation of ..." terms are left out."""
    rng = random.Random(seed)
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT _id, term, definition FROM go_term ORDER BY _id").fetchall()
        parents: dict[int, list[int]] = {}
        for table in ("go_bp_parents", "go_cc_parents", "go_mf_parents"):
            for child, parent in connection.execute(f"SELECT _id, _parent_id FROM {table}"):
                parents.setdefault(child, []).append(parent)
    names = {key: term for key, term, _ in rows}
    terms: list[Term] = [
        (term, definition or "", [], [names[p] for p in parents.get(key, []) if p in names])
        for key, term, definition in rows
        if "regulation of" not in term and not term.startswith("obsolete")
    ]
    yield from _term_texts(terms, rng, long_every=3)


def _obo(path: Path, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    terms: list[Term] = []
    names: dict[str, str] = {}
    raw = path.read_text(encoding="utf-8").split("\n[Term]\n")[1:]
    quoted = re.compile(r'"((?:[^"\\]|\\.)*)"')
    for block in raw:
        fields: dict[str, list[str]] = {}
        for line in block.splitlines():
            key, _, value = line.partition(": ")
            fields.setdefault(key, []).append(value)
        if "is_obsolete" in fields or "name" not in fields:
            continue
        names[fields["id"][0]] = fields["name"][0]
        texts = [quoted.search(value) for value in fields.get("def", [])[:1] + fields.get("comment", [])[:1]]
        definition = " ".join(match.group(1).replace("\\", "") for match in texts if match)
        definition = " ".join([definition, *(c.replace("\\", "") for c in fields.get("comment", []))]).strip()
        synonyms = [m.group(1) for m in (quoted.search(value) for value in fields.get("synonym", [])) if m]
        terms.append((fields["name"][0], definition, synonyms, [v.split(" ! ")[0] for v in fields.get("is_a", [])]))
    resolved = [(n, d, s, [names[p] for p in ps if p in names]) for n, d, s, ps in terms]
    yield from _term_texts(resolved, rng, long_every=1)


def _icd(path: Path, seed: int) -> Iterator[str]:
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".xml"))
        root = ElementTree.fromstring(wheel.read(name))
    texts = [note.text or "" for note in root.iter("note")]
    texts += [
        desc.text or ""
        for diag in root.iter("diag")
        for desc in diag.findall("desc")
        if len(diag.findtext("name") or "") <= 6
    ]
    texts = [t for t in dict.fromkeys(texts) if len(t) > 8]
    yield from random.Random(seed).sample(texts, min(12_000, len(texts)))


def _debian(path: Path, seed: int) -> Iterator[str]:
    """Package descriptions in English, one for each family of packages (-dev, -doc, -data repeat each other)."""
    seen: set[str] = set()
    texts: list[str] = []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        match = re.search(r"^Description-en: (.*(?:\n .*)*)", block, re.M)
        if not match:
            continue
        short, _, body = match.group(1).partition("\n")
        paragraphs = re.sub(r"^ ", "", body, flags=re.M).split("\n.\n")
        first = paragraphs[0].strip()
        if first[:60] in seen or len(first) < 120:
            continue
        seen.add(first[:60])
        texts.append(f"{short} {' '.join(paragraphs)}")
    rng = random.Random(seed)
    for number, text in enumerate(rng.sample(texts, min(9_000, len(texts)))):
        yield text if number % 3 else text[:160].rsplit(" ", 1)[0]


READERS: list[tuple[Callable[[Path], bool], Callable[[Path, int], Iterable[str]]]] = [
    (lambda p: (p / "corpus.jsonl.gz").is_file(), _beir),
    (lambda p: (p / "lbl.json.gz").is_file(), _extreme),
    (lambda p: (p / "data.verb").is_file(), _wordnet),
    (lambda p: p.name == "GO.sqlite", _gene_ontology),
    (lambda p: p.suffix == ".obo", _obo),
    (lambda p: p.name.startswith("cellxgene_ontology_guide") and p.suffix == ".whl", _cellxgene),
    (lambda p: p.name.startswith("simple_icd_10_cm") and p.suffix == ".whl", _icd),
    (lambda p: p.suffix == ".txt", _debian),
]


class Overlap:
    """Tells whether a text shares a run of OVERLAP_WORDS words with some BEIR folder: `text in Overlap(folders)`."""

    def __init__(self, folders: Iterable[Path]):
        # Hashes, not words: a chance equality among some 10^7 of 2^64 would only drop one text more.
        self._runs = {run for folder in folders for text in _beir(folder, 0) for run in self._hashes(text)}

    def __contains__(self, text: str) -> bool:
        return any(run in self._runs for run in self._hashes(text))

    @staticmethod
    def _hashes(text: str) -> Iterator[int]:
        words = re.findall(r"[a-z0-9]+", text.lower())
        for start in range(len(words) - OVERLAP_WORDS + 1):
            yield hash(tuple(words[start : start + OVERLAP_WORDS]))


#: Ways in which people type what they look for, around one or two terms.
PHRASES = (
    "what is {}", "how does {} work", "difference between {} and {}", "{} definition", "why is {} important",
    "what is the role of {} in {}", "examples of {}", "where is {} found", "the effect of {} on {}",
    "who first described {}", "how to measure {}", "{} and {}", "which {} is associated with {}",
    "does {} increase {}?", "meaning of {}", "can {} be prevented?", "when does {} occur",
)  # fmt: skip


def questions(texts: Mapping[str, list[str]], *, seed: int = 0, count: int = 5000) -> list[str]:
    """Question phrases around short terms of `texts`, so that their little words are seen at work."""
    rng = random.Random(seed)
    sources = [texts[name] for name in ("wordnet-nouns", "hpo", "cellxgene", "go") if name in texts]
    terms = [text for source in sources for text in source if len(text) < 50 and text.count(" ") < 5]
    return [rng.choice(PHRASES).format(*rng.sample(terms, 2)) for _ in range(count)] if len(terms) > 1 else []
