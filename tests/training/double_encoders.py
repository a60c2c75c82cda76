"""Tiny encoders in float64, and batches in the shape of BatchBuilder, for comparisons of gradients to 1e-6."""

from itertools import pairwise

import torch
from torch.nn import functional

from shortlist.losses import build_loss
from shortlist.retrieval import DualEncoder
from shortlist.retrieval.transformer import TransformerTower
from shortlist.training.batches import Pairs, even_counts

QUERIES = ["the moon", "bread and flour", "fever", "volcano and rain", "cough", "the stars of the night", "salt"]
DOCUMENTS = [*QUERIES[::-1], "moon phases", "a loaf of bread with salt", "rain", "clouds over the sea"]
# Two positives for some queries, one for others, none for the last. In two parts of 6 and 5 documents, columns 5 and 10
# are the last of their part: the public code of DEXML never treats those as positives.
PAIRS = [
    (0, 6, 1.0), (0, 7, 2.0), (1, 5, 1.0), (1, 8, 1.0), (2, 4, 3.0), (3, 3, 1.0), (3, 10, 1.0), (4, 2, 1.0),
    (5, 1, 1.0),
]  # fmt: skip


def open_double(path):
    """An encoder in float64, in training mode (dropout is on where it has any)."""
    encoder = DualEncoder.from_pretrained(path, query_max_length=12, doc_max_length=12).double().train()
    for tower in encoder.towers():
        # The towers give float32 by contract; here the arithmetic has to be finer than the comparison.
        tower.forward = _double_forward(tower)
    return encoder


def _double_forward(tower):
    def forward(features):
        if isinstance(tower, TransformerTower):
            mask = features["attention_mask"]
            hidden = tower.backbone(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
            pooled = (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        else:
            weight = tower.embedding.weight
            pooled = functional.embedding_bag(features["input_ids"], weight, features["offsets"], mode="mean")
        return functional.normalize(pooled, dim=-1)

    return forward


def chunks_of(tokenize, texts, size):
    """Features of `texts`, `size` of them at once."""
    return [tokenize(texts[start : start + size]) for start in range(0, len(texts), size)]


def a_loss(name):
    """A loss of the registry with options that fit eleven documents."""
    return build_loss(name, **({"k": 3} if name == "soft_top_k" else {}))


def a_batch(encoder, *, rank=0, world=1, micro=None, queries=QUERIES, documents=DOCUMENTS, pairs=PAIRS, left_out=None):
    """What BatchBuilder gives process `rank` of `world` for these texts and positives."""
    counts = {"queries": even_counts(len(queries), world), "documents": even_counts(len(documents), world)}
    features = {}
    for side, texts, tokenize in (
        ("queries", queries, encoder.tokenize_queries), ("documents", documents, encoder.tokenize_documents),
    ):  # fmt: skip
        bounds = list(pairwise([sum(counts[side][:number]) for number in range(world + 1)]))
        start, stop = bounds[rank]
        features[side] = chunks_of(tokenize, texts[start:stop], micro or max(1, stop - start))
    teacher = torch.randn(len(queries), len(documents), generator=torch.Generator().manual_seed(5))
    everywhere = [(row, column) for row in range(len(queries)) for column in range(len(documents))]
    return {
        **features,
        "query_counts": counts["queries"],
        "document_counts": counts["documents"],
        "document_rows": torch.arange(len(documents)),
        "positives": as_pairs(pairs),
        "left_out": as_pairs(left_out) if left_out else None,
        "valid": None,
        "teacher": as_pairs([(row, column, float(teacher[row, column])) for row, column in everywhere]),
    }


def as_pairs(entries):
    rows, columns, values = zip(*sorted(entries), strict=True)
    return Pairs(torch.tensor(rows), torch.tensor(columns), torch.tensor(values, dtype=torch.float32))


def gradients_of(encoder):
    return {name: value.grad.clone() for name, value in encoder.named_parameters() if value.grad is not None}


def assert_equal_gradients(left, right):
    """Equal to 1e-6 of the largest entry, and the same parameters have one."""
    assert left.keys() == right.keys() and left
    largest = max(float(value.abs().max()) for value in right.values())
    assert largest > 1e-6
    for key in left:
        assert float((left[key] - right[key]).abs().max()) <= 1e-6 * largest, key
