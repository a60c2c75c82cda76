"""Which sign of the frequency bias helps: one model for each way of choosing negatives, searched with every strength.

    python benchmarks/frequency_bias.py --data DIR [--titles 40000] [--epochs 2] [--output FILE]

DIR is an extreme-classification folder (made for yso-titles: 20,687 labels). Each model is the embedded static encoder
trained with InfoNCE on the first titles of train, batch 512, temperature 0.05; they differ in `data.negatives` alone.
Measured on the first 4,000 test titles: the table shows the shape, it does not choose a strength. About ten minutes on
two cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import common

from shortlist import DualEncoder, ExactIndex, Retriever, evaluate, load_collection
from shortlist.commands.train import train
from shortlist.config import build_config
from shortlist.indexes import FrequencyPrior
from shortlist.metrics import count_labels
from shortlist.types import Qrels

NEGATIVES = ("all", "in_batch", "sampled(2000)")
STRENGTHS = (-1, -0.5, -0.25, 0, 0.25, 0.5, 1)
MEASURES = ["P@1", "P@5", "PSP@1", "PSP@5", "R@100"]


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--data", required=True, help="XC folder with label texts")
    parser.add_argument("--titles", type=int, default=40_000, help="of train, from the first")
    parser.add_argument("--tested", type=int, default=4_000, help="test titles, from the first")
    parser.add_argument("--epochs", type=float, default=2)
    options = parser.parse_args()

    collection = load_collection(options.data)
    train_labels, judged = collection.qrels("train"), collection.qrels("test")
    counts = count_labels(train_labels)
    queries = dict(list(collection.queries("test").items())[: options.tested])
    qrels = Qrels({query: judged[query] for query in queries}, name="test")
    rows: list[dict[str, Any]] = []
    for negatives in NEGATIVES:
        settings = {
            "data": {"path": options.data, "dev": "none", "negatives": negatives, "max_queries": options.titles},
            "loss": "info_nce",
            "training": {
                "learning_rate": 0.01, "weight_decay": 0.0, "batch_size": 512, "num_train_epochs": options.epochs,
                "temperature": 0.05,
            },
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "model"
            train(build_config(settings), output=output)
            encoder = DualEncoder.from_pretrained(output)
            prior = FrequencyPrior(counts, len(collection.corpus), encoder.temperature, {"split": "train"})
            index = ExactIndex.build(encoder, collection.corpus, frequency_prior=prior)
            for strength in STRENGTHS:
                run = Retriever(encoder, index, frequency_bias=strength).search(queries, 100)
                means = evaluate(qrels, run, MEASURES, train_counts=counts, num_train=len(train_labels)).mean
                rows.append({"negatives": negatives, "bias": strength, **{k: 100 * v for k, v in means.items()}})
                sys.stderr.write(f"{rows[-1]}\n")
    common.report(
        "frequency_bias", rows, options.output, data=collection.name, checksums=collection.checksums(),
        titles=options.titles, tested=len(queries), epochs=options.epochs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
