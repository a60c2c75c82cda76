"""Does training help, and which loss: the embedded encoder before training and after it with four losses.

    python benchmarks/training_losses.py --data DIR [--split dev] [--seeds 1 2 3] [--output training_losses.json]

DIR is MedQuAD in BEIR form (15,641 training questions, 766 in dev). Every run starts from the same encoder and uses the
packaged recipe `medquad-dual-encoder`: only the loss and the seed differ. Checkpoints are chosen on pages held out of
train, never on the split that is reported. Prints nDCG@10 (mean and standard deviation over the seeds).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import common

from shortlist import DualEncoder, ExactIndex, Retriever, evaluate, load_collection
from shortlist.commands.train import TrainResult, train
from shortlist.config import load_config
from shortlist.data import Collection

LOSSES = {
    "info_nce": ["loss=info_nce"],
    "decoupled_softmax": ["loss=decoupled_softmax"],
    "soft_top_k": ["loss={name: soft_top_k, k: 5}"],
    "one_vs_all_bce": ["loss=one_vs_all_bce"],
}


def measure(model: str, collection: Collection, split: str, metric: str) -> float:
    """Exact search with a model over the whole corpus."""
    encoder = DualEncoder.from_pretrained(model)
    retriever = Retriever(encoder, ExactIndex.build(encoder, collection.corpus))
    run = retriever.search(collection.queries(split), k=100, exclude_self=collection.exclude_self)
    return evaluate(collection.qrels(split), run, [metric]).mean[metric]


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--data", required=True, help="MedQuAD, or another collection with a train split")
    parser.add_argument("--split", default="dev", help="the split that is reported")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--config", default="medquad-dual-encoder")
    parser.add_argument("--metric", default="nDCG@10")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args()

    collection = load_collection(options.data)
    overrides = [f"data.path={options.data}", "training.eval_at_start=false", *options.set]
    start = load_config(options.config, overrides).model.path
    untrained = measure(start, collection, options.split, options.metric)
    rows: list[dict[str, Any]] = [{"loss": "untrained", options.metric: untrained}]
    sys.stderr.write(f"untrained: {untrained:.4f}\n")
    for loss in options.losses:
        values, seconds = [], []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "model"
                began = time.perf_counter()
                result = train(options.config, overrides=[*overrides, *LOSSES[loss], f"seed={seed}"], output=output)
                assert isinstance(result, TrainResult)
                seconds.append(time.perf_counter() - began)
                values.append(measure(str(output), collection, options.split, options.metric))
                sys.stderr.write(
                    f"{loss}, seed {seed}: {values[-1]:.4f} (step {result.best_step} of {result.steps}, "
                    f"held out {result.measures.get(options.metric, float('nan')):.4f}, {seconds[-1]:.0f} s)\n"
                )
        rows.append(_row(loss, options.metric, values, seconds, untrained))
    common.report(
        "training_losses", rows, options.output, data=collection.name, split=options.split, seeds=options.seeds,
        checksums=collection.checksums(), model=start, config=options.config, settings=options.set,
    )  # fmt: skip


def _row(loss: str, metric: str, values: Sequence[float], seconds: Sequence[float], start: float) -> dict[str, Any]:
    return {
        "loss": loss,
        metric: statistics.mean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "gain": statistics.mean(values) - start,
        "values": [round(value, 4) for value in values],
        "train s": statistics.median(seconds),
    }


if __name__ == "__main__":
    main()
