"""One training step's data: which documents are scored, which of them are positives, drawn by (seed, epoch, query).

Every batch has one pool of documents, without copies (by id or by text). Each known positive of a query that is in the
pool, for whatever reason it is there, counts as its positive: documents judged for other queries, mined negatives and
equal texts under another id never act as false negatives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from shortlist.errors import ConfigError
from shortlist.training.examples import Documents, Example, ExampleSet

logger = logging.getLogger(__name__)

Negatives = Literal["in_batch", "all", "given", "bm25"]

# Above this many documents, token ids are made anew each step instead of being kept.
CACHED_DOCUMENTS = 300_000


class TrainableEncoder(Protocol):
    """What training needs of a dual encoder (shortlist.retrieval.DualEncoder is one)."""

    query_tower: Any
    document_tower: Any
    query_max_length: int | None
    doc_max_length: int | None

    def with_prompt(self, texts: list[str], side: str) -> list[str]:
        """`texts` with the prompt of `side` before each."""
        ...


@dataclass(frozen=True)
class Pairs:
    """Entries of a sparse (queries, docs) matrix: rows, columns and values, each `(n,)`."""

    rows: Tensor
    columns: Tensor
    values: Tensor

    def dense(self, shape: tuple[int, int], *, fill: float = 0.0) -> Tensor:
        """Float32 matrix with `fill` where there is no entry."""
        matrix = torch.full(shape, fill, dtype=torch.float32, device=self.rows.device)
        matrix[self.rows, self.columns] = self.values
        return matrix

    def mask(self, shape: tuple[int, int]) -> Tensor:
        """True at the entries."""
        matrix = torch.zeros(shape, dtype=torch.bool, device=self.rows.device)
        matrix[self.rows, self.columns] = True
        return matrix

    def to(self, device: torch.device | str, **options: Any) -> Pairs:
        """The same on another device."""
        return Pairs(*(tensor.to(device, **options) for tensor in (self.rows, self.columns, self.values)))


class TokenStore:
    """Token ids of documents: made once and kept for small collections, made each time for large ones."""

    def __init__(self, encoder: TrainableEncoder, documents: Documents):
        self.encoder = encoder
        self.documents = documents
        self._keep = len(documents) <= CACHED_DOCUMENTS
        self._tokens: Any = None

    def tokens(self, rows: Sequence[int] | np.ndarray) -> Any:
        """Token ids (shortlist.retrieval.tokens.Tokens), one text a row, in the given order."""
        if not self._keep:
            return self._tokenise([self.documents.text(int(row)) for row in rows])
        if self._tokens is None:
            self._tokens = self._tokenise(list(self.documents.all_texts()))
            cut = int((self._tokens.full_lengths > self._tokens.lengths).sum())
            if cut:
                logger.warning(
                    "Training reads the first %s tokens of %d of %d documents (the longest has %d); "
                    "model.doc_max_length changes that.",
                    self.encoder.doc_max_length, cut, len(self._tokens), int(self._tokens.full_lengths.max()),
                )  # fmt: skip
        return self._tokens.take(np.asarray(rows, np.int64))

    def features(self, rows: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Features for the document tower, one text a row, in the given order."""
        features: dict[str, Tensor] = self.encoder.document_tower.collate(self.tokens(rows))
        return features

    def _tokenise(self, texts: list[str]) -> Any:
        prompted = self.encoder.with_prompt(texts, "document")
        return self.encoder.document_tower.tokens(prompted, max_length=self.encoder.doc_max_length)


class EpochSampler(Sampler):
    """Yields (epoch, query index) in an order that is a function of (seed, epoch); `epoch` is set from outside."""

    def __init__(self, size: int, *, seed: int):
        self.size = size
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
        return iter([(self.epoch, index) for index in order.tolist()])


class ExampleDataset(Dataset):
    """Passes (epoch, index) through: the batch builder looks the examples up and draws by epoch."""

    def __init__(self, examples: ExampleSet):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, item: tuple[int, int]) -> tuple[int, int]:
        return item


class BatchBuilder:
    """Collates (epoch, index) pairs into the features and masks of one step.

    Args:
        examples: the training set.
        encoder: gives tokens and features.
        negatives: "in_batch" (the documents of the batch), "all" (every document of the collection), "given" or
            "bm25" (those listed with the query, in addition to the documents of the batch).
        num_negatives: listed negatives drawn a query and step; None draws all.
        share_negatives: False lets a query see only its own documents.
        max_positives: positives drawn a query and step; None takes all. With "all", every positive is in the pool
            anyway and counts.
        graded: positives carry their grade instead of 1.
        teacher: lists carry teacher scores, and every query sees only its own list.
        seed: of the draws.
    """

    def __init__(
        self,
        examples: ExampleSet,
        encoder: TrainableEncoder,
        *,
        negatives: Negatives = "in_batch",
        num_negatives: int | None = None,
        share_negatives: bool = True,
        max_positives: int | None = None,
        graded: bool = False,
        teacher: bool = False,
        seed: int = 42,
    ):
        self.examples = examples
        self.encoder = encoder
        self.documents = examples.documents
        self.tokens = TokenStore(encoder, self.documents)
        self.negatives = negatives
        self.num_negatives = num_negatives
        self.share_negatives = share_negatives and not teacher
        self.max_positives = max_positives
        self.graded = graded
        self.teacher = teacher
        self.seed = seed
        if negatives in ("given", "bm25") and not any(len(example.negatives) for example in examples):
            raise ConfigError(
                f"data.negatives is {negatives!r} but no training query has a negative of its own; "
                "set data.negatives to in_batch or all."
            )
        self._all: tuple[dict[int, int], dict[str, Tensor]] | None = None

    def __call__(self, items: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Features of "queries" and "documents", and Pairs "positives", "valid", "teacher" of the queries at `items`.

        Without limits on what a query may see, "valid" is None; "teacher" is None unless lists carry teacher scores.
        """
        chosen = [self.examples.examples[index] for _, index in items]
        texts = self.encoder.with_prompt([example.query for example in chosen], "query")
        query_tokens = self.encoder.query_tower.tokens(texts, max_length=self.encoder.query_max_length)
        own = [self._draw(example, epoch, index) for example, (epoch, index) in zip(chosen, items, strict=True)]
        columns, features = self._all_documents() if self.negatives == "all" else self._pool(own)
        positives = self._positives([index for _, index in items], columns)
        valid = None if self.share_negatives else self._own(own, columns, positives)
        return {
            "queries": self.encoder.query_tower.collate(query_tokens),
            "documents": features,
            "positives": positives,
            "valid": valid,
            "teacher": self._teacher(chosen, own, columns) if self.teacher else None,
        }

    def _draw(self, example: Example, epoch: int, index: int) -> list[int]:
        """Rows this query brings into the pool: its positives and negatives, drawn by (seed, epoch, index)."""
        random = np.random.default_rng((self.seed, epoch, index))
        positives, negatives = example.positives, example.negatives
        if self.max_positives is not None and len(positives) > self.max_positives:
            positives = random.choice(positives, self.max_positives, replace=False)
        if self.negatives not in ("given", "bm25"):
            negatives = negatives[:0]
        elif self.num_negatives is not None and len(negatives) > self.num_negatives:
            negatives = random.choice(negatives, self.num_negatives, replace=False)
        return [*positives.tolist(), *negatives.tolist()]

    def _pool(self, own: list[list[int]]) -> tuple[dict[int, int], dict[str, Tensor]]:
        """Text key → column, and the features of the columns: the union of the batch without copies."""
        rows: dict[int, int] = {}
        for drawn in own:
            for row in drawn:
                rows.setdefault(self.documents.key(row), row)
        return {key: column for column, key in enumerate(rows)}, self.tokens.features(list(rows.values()))

    def _all_documents(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        if self._all is None:
            rows = self.documents.unique_rows()
            columns = {self.documents.key(int(row)): column for column, row in enumerate(rows)}
            self._all = columns, self.tokens.features(rows)
        return self._all

    def _positives(self, indices: list[int], columns: dict[int, int]) -> Pairs:
        """Every known positive of each query that is a column."""
        entries = [
            (row, columns[key], grade)
            for row, index in enumerate(indices)
            for key, grade in self.examples.known[index].items()
            if key in columns
        ]
        return _pairs(entries if self.graded else [(row, column, 1.0) for row, column, _ in entries])

    def _own(self, own: list[list[int]], columns: dict[int, int], positives: Pairs) -> Pairs:
        """The entries a query may see when negatives are not shared: what it brought, and its positives."""
        brought = {(row, columns[self.documents.key(document)]) for row, drawn in enumerate(own) for document in drawn}
        brought |= set(zip(positives.rows.tolist(), positives.columns.tolist(), strict=True))
        return _pairs([(row, column, 1.0) for row, column in sorted(brought)])

    def _teacher(self, chosen: list[Example], own: list[list[int]], columns: dict[int, int]) -> Pairs:
        return _pairs(
            [
                (row, columns[self.documents.key(document)], example.teacher[document])
                for row, (example, drawn) in enumerate(zip(chosen, own, strict=True))
                for document in drawn
                if example.teacher is not None and document in example.teacher
            ]
        )


def _pairs(entries: list[tuple[int, int, float]]) -> Pairs:
    rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
    return Pairs(torch.tensor(rows).long(), torch.tensor(columns).long(), torch.tensor(values, dtype=torch.float32))
