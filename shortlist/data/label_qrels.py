"""Judgements that stay a sparse matrix: millions of points with dozens of labels each, as qrels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import scipy.sparse

from shortlist.types import Qrels


class LabelQrels(Qrels):
    """Qrels over a relevance matrix `(points, labels)`; the dictionary of a query is made when it is asked for.

    Whole-number relevance is the grade. If any value of the matrix is fractional, relevance above 0 is grade 1 and
    the rest grade 0; the real values stay in `matrix`. `grades` runs along `matrix.data`.
    """

    def __init__(
        self,
        point_ids: Sequence[str],
        label_ids: Sequence[str],
        matrix: scipy.sparse.csr_matrix,
        *,
        name: str | None = None,
    ):
        super().__init__({}, name=name)
        self.point_ids, self.label_ids, self.matrix = point_ids, label_ids, matrix
        whole = bool((matrix.data == np.floor(matrix.data)).all())
        self.grades = matrix.data.astype(np.int64) if whole else (matrix.data > 0).astype(np.int64)
        self._row = {point: row for row, point in enumerate(point_ids)}

    def __getitem__(self, query: str) -> dict[str, int]:
        row = self._row[query]
        start, stop = int(self.matrix.indptr[row]), int(self.matrix.indptr[row + 1])
        labels = self.label_ids
        return {
            labels[column]: grade
            for column, grade in zip(
                self.matrix.indices[start:stop].tolist(), self.grades[start:stop].tolist(), strict=True
            )
        }

    def __contains__(self, query: object) -> bool:
        return query in self._row

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def num_judgements(self) -> int:
        """Number of (point, label) pairs in the matrix."""
        return int(self.matrix.nnz)

    def relevant(self, query: str) -> dict[str, int]:
        """The labels of a point with a grade of at least 1; empty for an unknown point."""
        return {label: grade for label, grade in self[query].items() if grade >= 1} if query in self._row else {}


def positive_counts(qrels: Qrels) -> dict[str, int]:
    """Label (document) id → number of queries it is relevant to: the training counts that PSP@k weighs by.

    Labels of a LabelQrels that are never positive are included with 0.
    """
    if isinstance(qrels, LabelQrels):
        counts = np.bincount(qrels.matrix.indices[qrels.grades > 0], minlength=len(qrels.label_ids))
        return dict(zip(qrels.label_ids, counts.tolist(), strict=True))
    found: dict[str, int] = {}
    for query in qrels:
        for document in qrels.relevant(query):
            found[document] = found.get(document, 0) + 1
    return found
