"""Claim: with the gradient cache the activations of a step do not grow with the number of labels, its time grows
linearly, and scores are never all in memory: a million labels fit where the plain step runs out at some thousands.

One step is: encode queries and all labels, DecoupledSoftmax over every label, backward, AdamW. Every row runs in a
process of its own. "peak" is the highest RssAnon above that after the imports, so it holds model, optimiser, token
ids, label vectors and their gradients too; "activations" are the bytes that graphs hold for their backward pass at
most, weights left out. Labels are synthetic: words drawn from the vocabulary of the embedded encoder.

    python benchmarks/dexml_memory.py --list
    python benchmarks/dexml_memory.py --rows 'static-*' --output memory.json

The transformer has 6 layers of 384 and random weights; its rows take minutes on two cores. The row of 1,305,265 labels
is computed from the two largest cached rows that ran, not run.
"""

import argparse
import fnmatch
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from common import anonymous_mib, arguments, report

LABELS = (4_000, 20_000, 131_073, 1_305_265)
WORDS = 2  # a label; with the special tokens of the transformer about 4 tokens
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One step to be measured; `limit` is the peak in MiB that it must stay under.

    The first step counts activations; without further `steps` its time is the one reported. CPU seconds, summed over
    the threads, hold on a busy machine too.
    """

    encoder: str
    labels: int
    cached: bool
    batch: int = 512
    micro: int = 512
    steps: int = 0
    limit: int | None = None

    @property
    def name(self) -> str:
        name = f"{self.encoder}-{self.labels}-{'cached' if self.cached else 'plain'}"
        return name if self.batch == 512 else f"{name}-batch{self.batch}"


ROWS = [
    *(Row("static", labels, False, steps=3) for labels in LABELS[:3]),
    Row("static", LABELS[3], False),
    *(Row("static", labels, True, micro=16_384, steps=3) for labels in LABELS[:3]),
    Row("static", LABELS[3], True, micro=16_384, limit=16 << 10),
    Row("static", LABELS[2], True, micro=16_384, batch=3_000, limit=1536),
    *(Row("transformer", labels, False) for labels in LABELS[:2]),
    *(Row("transformer", labels, True) for labels in LABELS[:2]),
    Row("transformer", LABELS[2], True, limit=8 << 10),
]


# The child ----------------------------------------------------------------------------------------------


def child(row: Row) -> None:
    """Measure one row and print it as JSON."""
    for module in ("shortlist.training.step", "shortlist.retrieval.transformer", "shortlist.losses", "transformers"):
        import_module(module)
    import torch

    sampler = Sampler()
    encoder = open_encoder(row.encoder)
    batch = make_batch(encoder, row)
    step = Step(encoder)
    seconds, processor = [], []

    def timed() -> float:
        gc.collect()
        start, spent = time.perf_counter(), time.process_time()
        value = step(batch)
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - spent)
        return value

    with Activations(encoder) as activations:
        value = timed()
    for _ in range(row.steps):
        timed()
    later = slice(1 if row.steps else 0, None)
    peak = sampler.stop()
    found = {
        "peak MiB": round(peak, 1),
        "activations MiB": round(activations.peak / MIB, 2),
        "seconds a step": round(statistics.median(seconds[later]), 3),
        "CPU seconds": round(statistics.median(processor[later]), 3),
        "loss": round(value, 4),
        "parameters": sum(parameter.numel() for parameter in encoder.parameters()),
        "threads": torch.get_num_threads(),
    }
    sys.stdout.write(json.dumps(found) + "\n")


class Sampler:
    """The highest RssAnon above that of its start, read every few milliseconds by a thread."""

    def __init__(self) -> None:
        self.start = self.peak = anonymous_mib()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.003):
            self.peak = max(self.peak, anonymous_mib())

    def stop(self) -> float:
        self._done.set()
        self._thread.join()
        return max(self.peak, anonymous_mib()) - self.start


class Activations:
    """Bytes that graphs hold for their backward pass, at most; weights and shared storage count once or not at all."""

    def __init__(self, encoder: Any) -> None:
        import torch

        weights = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}
        self.now = self.peak = 0
        held: dict[int, int] = {}

        class Held:
            def __init__(self, tensor: Any) -> None:
                self.tensor, self.counted = tensor.detach(), False
                storage = tensor.untyped_storage()
                self.key, self.size = storage.data_ptr(), storage.nbytes()
                if self.key in weights:
                    return
                self.counted = True
                held[self.key] = held.get(self.key, 0) + 1
                if held[self.key] == 1:
                    counter.now += self.size
                    counter.peak = max(counter.peak, counter.now)

            def __del__(self) -> None:
                if self.counted:
                    held[self.key] -= 1
                    if not held[self.key]:
                        counter.now -= self.size

        counter = self
        self._hooks = torch.autograd.graph.saved_tensors_hooks(Held, lambda kept: kept.tensor)

    def __enter__(self) -> "Activations":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


class Step:
    """Forward, backward and update, as a training run does them."""

    def __init__(self, encoder: Any) -> None:
        import torch

        from shortlist.losses import DecoupledSoftmax
        from shortlist.training.objective import Objective

        self.encoder = encoder
        self.objective = Objective(DecoupledSoftmax(), temperature=0.05, dim=encoder.dim, normalise=True)
        self.optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5, fused=True)

    def __call__(self, batch: dict[str, Any]) -> float:
        from shortlist.training.step import batch_loss

        loss = batch_loss(self.encoder, self.objective, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def open_encoder(kind: str) -> Any:
    """The embedded static encoder, or a transformer of 6 layers of 384 with random weights, in training mode."""
    import torch
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from shortlist.retrieval import DualEncoder
    from shortlist.retrieval.transformer import TransformerTower

    static = DualEncoder.from_pretrained("shortlist/static-en")
    if kind == "static":
        return static.train()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(static.query_tower.embedding.weight), hidden_size=384, num_hidden_layers=6,
        num_attention_heads=12, intermediate_size=1536, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=static.query_tower.tokenizer, pad_token="[PAD]")
    return DualEncoder(TransformerTower(BertModel(config, add_pooling_layer=False), tokenizer)).train()


def make_batch(encoder: Any, row: Row) -> dict[str, Any]:
    """Features of random texts in micro-batches, and one to four positives a query."""
    import numpy as np
    import torch

    from shortlist.training.batches import Pairs

    random = np.random.default_rng(0)
    vocabulary = np.array(sorted(word for word in encoder.query_tower.tokenizer.get_vocab() if word.isalpha()))

    def features(texts: int, tokenize: Any) -> list[Any]:
        size = row.micro if row.cached else texts
        sizes = [min(size, texts - start) for start in range(0, texts, size)]
        return [
            tokenize([" ".join(words) for words in vocabulary[random.integers(0, len(vocabulary), (count, WORDS))]])
            for count in sizes
        ]

    counts = random.integers(1, 5, row.batch)
    cells = [
        (query, label)
        for query, count in enumerate(counts)
        for label in sorted(random.choice(row.labels, count, replace=False))
    ]
    rows, columns = (torch.tensor(side) for side in zip(*cells, strict=True))
    return {
        "queries": features(row.batch, encoder.tokenize_queries),
        "documents": features(row.labels, encoder.tokenize_documents),
        "document_rows": torch.arange(row.labels),
        "positives": Pairs(rows, columns, torch.ones(len(rows))),
        "left_out": None,
        "valid": None,
        "teacher": None,
    }


# The table ----------------------------------------------------------------------------------------------


def measure(row: Row) -> dict[str, Any]:
    """The figures of a row from a fresh process; "killed" where the machine had not enough memory."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(asdict(row))], stdout=subprocess.PIPE, text=True
    )
    shown = {
        "encoder": row.encoder,
        "labels": row.labels,
        "batch": row.batch,
        "micro-batch": row.micro if row.cached else None,
    }
    if done.returncode:
        return {**shown, "note": f"failed with exit code {done.returncode}"}
    found = json.loads(done.stdout)
    if row.limit is not None:
        found["limit MiB"] = row.limit
        found["note"] = "met" if found["peak MiB"] <= row.limit else "MISSED"
    return {**shown, **found}


def computed(rows: list[dict[str, Any]], encoder: str, labels: int) -> dict[str, Any] | None:
    """A cached row of `labels` on the line through the two largest cached rows of the encoder that ran."""
    ran = sorted(
        (row for row in rows if row["encoder"] == encoder and row["micro-batch"] and row["batch"] == 512
         and "peak MiB" in row),
        key=lambda row: row["labels"],
    )[-2:]  # fmt: skip
    if len(ran) < 2 or ran[1]["labels"] >= labels:
        return None
    beyond = (labels - ran[0]["labels"]) / (ran[1]["labels"] - ran[0]["labels"])
    figures = {key: round(ran[0][key] + beyond * (ran[1][key] - ran[0][key]), 1) for key in ("peak MiB", "CPU seconds")}
    return {
        "encoder": encoder, "labels": labels, "batch": 512, "micro-batch": ran[1]["micro-batch"], **figures,
        "activations MiB": ran[1]["activations MiB"], "note": "computed, not run",
    }  # fmt: skip


def flatness(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each encoder with the cache: largest over smallest activations, and CPU time for a thousand labels."""
    found = {}
    for encoder in dict.fromkeys(row["encoder"] for row in rows):
        cached = [
            row for row in rows
            if row["encoder"] == encoder and row["micro-batch"] and row["batch"] == 512 and "loss" in row
        ]  # fmt: skip
        # A pool smaller than one micro-batch holds less.
        whole = [row["activations MiB"] for row in cached if row["labels"] >= row["micro-batch"]]
        if len(whole) > 1:
            found[encoder] = {
                "activations, largest over smallest": round(max(whole) / min(whole), 3),
                "CPU milliseconds for a thousand labels": {
                    str(row["labels"]): round(row["CPU seconds"] * 1e6 / row["labels"], 2) for row in cached
                },
            }
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="*", help="names of rows, as a pattern; several separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(Row(**json.loads(options.child)))
        return
    patterns = options.rows.split(",")
    chosen = [row for row in ROWS if any(fnmatch.fnmatch(row.name, pattern) for pattern in patterns)]
    if options.list or not chosen:
        sys.stdout.write("\n".join(row.name for row in ROWS) + "\n")
        return
    rows = []
    for row in chosen:
        sys.stderr.write(f"{row.name}\n")
        rows.append(measure(row))
        sys.stderr.write(f"  {json.dumps(rows[-1])}\n")
    line = computed(rows, "transformer", LABELS[-1])
    report("dexml_memory", [*rows, *([line] if line else [])], options.output, flatness=flatness(rows))


if __name__ == "__main__":
    main()
