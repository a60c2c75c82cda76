"""Do mined negatives help: the same encoder trained with the batch's own documents, with more, and with mined ones.

    python benchmarks/mined_negatives.py --data DIR [--split dev] [--seeds 1 2 3] [--search] [--output mined.json]

DIR is MedQuAD in BEIR form (15,641 training questions, 766 in dev), or another collection with a train split. Every run
starts from the same encoder and has the packaged recipe's epochs, batches and loss; only the sources of negatives and
the seed differ. With --search the settings of mining are chosen first, with the seed 0 and by the measure on the part
of train that selects checkpoints: every number of negatives with every filter once, then the other first epochs for the
best of these. The reported split takes no part in that. Prints the mean, the standard deviation over the seeds, and the
gain over in_batch seed by seed.

`sampled` has as many documents a step as `mined`, drawn at random: it tells hard negatives from many negatives.
"""

from __future__ import annotations

import itertools
import math
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
from training_losses import measure

from shortlist import load_collection
from shortlist.commands.train import TrainResult, train
from shortlist.config import load_config
from shortlist.data import Collection

COUNTS = (1, 4, 8)
STARTS = (0, 1)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "relative_margin 0.05": {"relative_margin": 0.05},
    "relative_margin 0.2": {"relative_margin": 0.2},
    "skip 10": {"skip": 10},
}
DEFAULT = (4, 0, "none")


def settings(count: int, start: int, name: str) -> list[str]:
    """Overrides of a run with `count` mined negatives a query from epoch `start`, refreshed every epoch."""
    mining = {"start_epoch": start, "refresh_epochs": 1, **FILTERS[name]}
    listed = ", ".join(f"{key}: {value}" for key, value in mining.items())
    return [f"data.negatives=[mined({count})]", f"data.mining={{{listed}}}"]


def run(
    config: str, overrides: Sequence[str], options: Any, collection: Collection | None
) -> tuple[float, float, float]:
    """Measure on the reported split of `collection` (NaN without), on the held-out part of train, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "model"
        began = time.perf_counter()
        result = train(config, overrides=list(overrides), output=output)
        seconds = time.perf_counter() - began
        assert isinstance(result, TrainResult)
        reported = math.nan
        if collection is not None:
            reported = measure(str(output), collection, options.split, options.metric)
        return reported, result.measures[options.metric], seconds


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--data", required=True, help="MedQuAD, or another collection with a train split")
    parser.add_argument("--split", default="dev", help="the split that is reported")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--config", default="medquad-dual-encoder")
    parser.add_argument("--metric", default="nDCG@10")
    parser.add_argument(
        "--search", action="store_true", help="choose the settings of mining on the held-out part first"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args()

    collection = load_collection(options.data)
    common_settings = [f"data.path={options.data}", "training.eval_at_start=false", *options.set]
    resolved = load_config(options.config, common_settings)
    searched: list[dict[str, Any]] = []
    chosen = DEFAULT
    if options.search:
        points = [(count, STARTS[0], name) for count, name in itertools.product(COUNTS, FILTERS)]
        for point in points:
            overrides = [*common_settings, *settings(*point), "seed=0"]
            _, held_out, seconds = run(options.config, overrides, options, None)
            searched.append({"count": point[0], "start": point[1], "filter": point[2], "held out": held_out})
            sys.stderr.write(f"search {point}: held out {held_out:.4f} ({seconds:.0f} s)\n")
            best = max(searched, key=lambda row: row["held out"])
            if len(searched) == len(COUNTS) * len(FILTERS):
                points += [(best["count"], start, best["filter"]) for start in STARTS[1:]]
        chosen = best["count"], best["start"], best["filter"]

    size = resolved.training.batch_size * chosen[0]
    variants = {
        "in_batch": ["data.negatives=in_batch"],
        f"sampled({size})": [f"data.negatives=[sampled({size})]"],
        f"mined({chosen[0]})": settings(chosen[0], chosen[1], "none"),
    }
    if chosen[2] != "none":
        variants[f"mined({chosen[0]}), {chosen[2]}"] = settings(*chosen)
    untrained = measure(resolved.model.path, collection, options.split, options.metric)
    rows: list[dict[str, Any]] = [{"negatives": "untrained", options.metric: untrained}]
    plain: list[float] = []
    for name, overrides in variants.items():
        results = [
            run(options.config, [*common_settings, *overrides, f"seed={seed}"], options, collection)
            for seed in options.seeds
        ]
        values = [value for value, _, _ in results]
        plain = plain or values
        rows.append(
            {
                "negatives": name,
                options.metric: statistics.mean(values),
                "sd": statistics.stdev(values) if len(values) > 1 else None,
                "gain": statistics.mean(values) - statistics.mean(plain),
                "gains": [round(value - other, 4) for value, other in zip(values, plain, strict=True)],
                "held out": statistics.mean(held for _, held, _ in results),
                "train s": statistics.median(seconds for _, _, seconds in results),
            }
        )
        sys.stderr.write(f"{rows[-1]}\n")
    common.report(
        "mined_negatives", rows, options.output, data=collection.name, split=options.split, seeds=options.seeds,
        checksums=collection.checksums(), model=resolved.model.path, config=options.config, settings=options.set,
        mining={"count": chosen[0], "start_epoch": chosen[1], "filter": chosen[2]}, searched=searched,
    )  # fmt: skip


if __name__ == "__main__":
    main()
