"""One training step's data: which documents are scored, which of them are positives, drawn by (seed, epoch, query).

Every batch has one pool of documents, without copies (by id or by text). Each known positive of a query that is in the
pool, for whatever reason it is there, counts as its positive: documents judged for other queries, mined negatives and
equal texts under another id never act as false negatives. Documents that must not be predicted for a query (filter
files: a text beside itself) are neither its positives nor its negatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from shortlist.errors import ConfigError
from shortlist.settings import NegativeSource
from shortlist.training.documents import Documents
from shortlist.training.examples import ExampleSet
from shortlist.training.pools import Drawn, PoolDraws
from shortlist.training.token_store import TokenStore

# Token ids, and the features of a pool of all documents, are kept up to this size and made anew each step above it.
KEPT_BYTES = 1 << 30


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
    """Collates the (epoch, index) pairs of a global batch into the features and positives of one step.

    Every process calls it with the same pairs and gets the same pool; of the features it makes its own part only.

    Args:
        examples: the training set.
        encoder: gives tokens and features.
        sources: of negatives (shortlist.training.pools); the positives of the batch are always in the pool.
        share_negatives: False lets a query see only its own documents.
        max_positives: positives a query brings into the pool; None: all. With "all", every positive is in it anyway.
        sample_positives: positives a query is scored on, drawn in proportion to relevance; None: all in the pool.
        graded: positives carry their grade instead of 1.
        weights: `(docs,)` factors of the positives' values, such as inverse propensities; None: none.
        teacher: lists carry teacher scores, and every query sees only its own list.
        seed: of the draws.
        rank: number of this process.
        world: number of processes.
        micro_batch_size: texts in one dictionary of features; None: one dictionary a side.

    Raises:
        ConfigError: a source of lists is named and no query has any.
    """

    def __init__(
        self,
        examples: ExampleSet,
        encoder: TrainableEncoder,
        *,
        sources: Sequence[NegativeSource] = (),
        share_negatives: bool = True,
        max_positives: int | None = None,
        sample_positives: int | None = None,
        graded: bool = False,
        weights: NDArray[np.float32] | None = None,
        teacher: bool = False,
        seed: int = 42,
        rank: int = 0,
        world: int = 1,
        micro_batch_size: int | None = None,
    ):
        self.examples = examples
        self.encoder = encoder
        self.documents = examples.documents
        self.draws = PoolDraws(
            examples, sources, max_positives=max_positives, sample_positives=sample_positives, seed=seed
        )
        # A pool of all documents is tokenised whole at every step: kept whatever it takes.
        self.tokens = _document_tokens(encoder, self.documents, budget=None if self.draws.everything else KEPT_BYTES)
        self._query_tokens = _query_tokens(encoder, examples)
        self.share_negatives = share_negatives and not teacher
        self.graded = graded
        self.weights = weights
        self.teacher = teacher
        self.rank = rank
        self.world = world
        self.micro_batch_size = micro_batch_size
        self.by_row = bool(getattr(encoder.document_tower, "by_row", False))
        self._sort = bool(getattr(encoder.document_tower, "sort_by_length", False))
        # Column of each corpus row in the pool of the moment, -1 outside it.
        self._column = np.full(len(self.documents), -1, np.int32)
        self._all: tuple[NDArray[np.int64], list[dict[str, Tensor]] | None] | None = None

    def __call__(self, items: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The step of the global batch `items`.

        Returns:
            "queries", "documents": features of this process's part, one dictionary a micro-batch;
            "query_counts", "document_counts": how many each process has, parts following one another;
            "document_rows": corpus row of each column of the pool, `(pool,)`;
            "positives": Pairs (row of the global batch, column of the pool, value), sorted;
            "left_out": Pairs of known positives in the pool that were not drawn, None unless positives are sampled;
            "excluded": Pairs that do not exist for the loss, None without filters;
            "valid": Pairs of what each query may see, None without limits;
            "teacher": Pairs of teacher scores, None unless lists carry them.
        """
        epochs, queries = np.array(items, np.int64).reshape(-1, 2).T
        drawn = self.draws(epochs, queries)
        rows = self._pool_of_all() if self.draws.everything else self._pool(drawn)
        self._column[rows] = np.arange(len(rows), dtype=np.int32)
        excluded = self._excluded(queries)
        positives, left_out = self._positives(queries, drawn, excluded)
        valid = None if self.share_negatives else self._visible(drawn, positives, left_out)
        teacher = self._teacher(queries, valid) if self.teacher and valid is not None else None
        if not self.draws.everything:
            self._column[rows] = -1
        query_counts = even_counts(len(queries), self.world)
        own = queries[sum(query_counts[: self.rank]) :][: query_counts[self.rank]]
        return {
            "queries": [self.encoder.query_tower.collate(self._query_tokens.tokens(part)) for part in self._parts(own)],
            "documents": self._features_of_all(rows) if self.draws.everything else self._features(rows),
            "query_counts": query_counts,
            "document_counts": even_counts(len(rows), self.world),
            "document_rows": torch.from_numpy(rows),
            "positives": positives,
            "left_out": left_out,
            "excluded": excluded,
            "valid": valid,
            "teacher": teacher,
        }

    # The pool -----------------------------------------------------------------------------------------

    def _pool(self, drawn: Drawn) -> NDArray[np.int64]:
        """Rows of the pool's columns: the union over the batch without copies."""
        return self._ordered(np.unique(np.concatenate([drawn.rows, drawn.shared])).astype(np.int64))

    def _ordered(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ascending by row, or by length within each process's part, so that micro-batches pad little."""
        if not self._sort:
            return rows
        order = rows[np.argsort(self.tokens.lengths(rows), kind="stable")]
        # Dealt out in turn: every process gets short and long texts alike.
        return np.concatenate([order[rank :: self.world] for rank in range(self.world)])

    def _pool_of_all(self) -> NDArray[np.int64]:
        if self._all is None:
            self._all = self._ordered(self.documents.unique_rows().astype(np.int64)), None
        return self._all[0]

    def _features_of_all(self, rows: NDArray[np.int64]) -> list[dict[str, Tensor]]:
        """Features of every document: made once if they are small enough to be kept."""
        if self._all is not None and self._all[1] is not None:
            return self._all[1]
        features = self._features(rows)
        size = sum(tensor.nbytes for part in features for tensor in part.values())
        if size <= KEPT_BYTES:
            self._all = rows, features
        return features

    def _features(self, rows: NDArray[np.int64]) -> list[dict[str, Tensor]]:
        """Features of this process's part of the pool."""
        counts = even_counts(len(rows), self.world)
        own = rows[sum(counts[: self.rank]) :][: counts[self.rank]]
        features = []
        # Looked-up vectors have no activations to save, and each further micro-batch a gradient of the whole table.
        looked_up = not getattr(self.encoder.document_tower, "reads_text", True)
        for part in [own] if looked_up and len(own) else self._parts(own):
            collated: dict[str, Tensor] = self.encoder.document_tower.collate(self.tokens.tokens(part))
            features.append({**collated, "rows": torch.from_numpy(part.copy())} if self.by_row else collated)
        return features

    def _parts(self, numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        size = self.micro_batch_size or max(1, len(numbers))
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]

    # The entries --------------------------------------------------------------------------------------

    def _excluded(self, queries: NDArray[np.int64]) -> Pairs | None:
        """Columns that must not be predicted for a query of the batch."""
        banned = self.examples.banned
        if banned is None:
            return None
        positions, owners = banned.entries(queries)
        columns = self._column[banned.items[positions]]
        owners, columns = owners[columns >= 0], columns[columns >= 0]
        order = np.lexsort((columns, owners))
        return _pairs(owners[order], columns[order], np.ones(len(order), np.float32))

    def _positives(
        self, queries: NDArray[np.int64], drawn: Drawn, excluded: Pairs | None
    ) -> tuple[Pairs, Pairs | None]:
        """Every known positive of each query that is a column: those that are scored, and those left out."""
        known = self.examples.known
        positions, owners = known.entries(self.examples.groups[queries])
        columns = self._column[known.items[positions]]
        inside = columns >= 0
        if excluded is not None:
            width = len(self._column)
            inside &= ~np.isin(owners * width + columns, excluded.rows.numpy() * width + excluded.columns.numpy())
        positions, owners, columns = positions[inside], owners[inside], columns[inside]
        if self._sort:
            order = np.lexsort((columns, owners))
            positions, owners, columns = positions[order], owners[order], columns[order]
        values = known.values_at(positions) if self.graded else np.ones(len(positions), np.float32)
        if self.weights is not None:
            values = values * self.weights[known.items[positions]]
        if drawn.scored is None:
            return _pairs(owners, columns, values), None
        scored = np.isin(self.draws.key(owners, known.items[positions]), drawn.scored)
        return (
            _pairs(owners[scored], columns[scored], values[scored]),
            _pairs(owners[~scored], columns[~scored], values[~scored]),
        )

    def _visible(self, drawn: Drawn, *listed: Pairs | None) -> Pairs:
        """The entries a query may see when negatives are not shared: what it brought, and its positives."""
        width = len(self._column)
        keys = [drawn.owners * width + self._column[drawn.rows]]
        keys += [pairs.rows.numpy() * width + pairs.columns.numpy() for pairs in listed if pairs is not None]
        owners, columns = np.divmod(np.unique(np.concatenate(keys)), width)
        return _pairs(owners, columns, np.ones(len(owners), np.float32))

    def _teacher(self, queries: NDArray[np.int64], valid: Pairs) -> Pairs:
        """Teacher scores of what each query sees of its own list."""
        taught = self.examples.teacher
        if taught is None:
            raise ConfigError("the lists carry no teacher scores; choose a loss that needs judgements only.")
        positions, owners = taught.entries(queries)
        columns = self._column[taught.items[positions]]
        width = len(self._column)
        seen = np.isin(owners * width + columns, valid.rows.numpy() * width + valid.columns.numpy()) & (columns >= 0)
        return _pairs(owners[seen], columns[seen], taught.values_at(positions[seen]))


def even_counts(total: int, parts: int) -> list[int]:
    """How many of `total` each of `parts` gets when the first ones take one more: [3, 2, 2] for 7 in 3."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _pairs(rows: NDArray[np.integer], columns: NDArray[np.integer], values: NDArray[np.float32]) -> Pairs:
    return Pairs(
        torch.from_numpy(rows.astype(np.int64)),
        torch.from_numpy(columns.astype(np.int64)),
        torch.from_numpy(values.astype(np.float32)),
    )


def _document_tokens(encoder: TrainableEncoder, documents: Documents, *, budget: int | None) -> TokenStore:
    def tokenise(texts: list[str]) -> Any:
        return encoder.document_tower.tokens(encoder.with_prompt(texts, "document"), max_length=encoder.doc_max_length)

    return TokenStore(
        len(documents),
        documents.all_texts,
        documents.texts,
        tokenise,
        budget=budget,
        told=f"Training reads the first {encoder.doc_max_length} tokens of %d of %d documents (the longest has %d); "
        "model.doc_max_length changes that.",
    )


def _query_tokens(encoder: TrainableEncoder, examples: ExampleSet) -> TokenStore:
    def tokenise(texts: list[str]) -> Any:
        return encoder.query_tower.tokens(encoder.with_prompt(texts, "query"), max_length=encoder.query_max_length)

    queries = examples.queries
    return TokenStore(
        len(queries),
        lambda: queries,
        lambda numbers: [queries[number] for number in numbers.tolist()],
        tokenise,
        budget=KEPT_BYTES,
    )
