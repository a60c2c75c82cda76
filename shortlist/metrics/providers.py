"""Every other measure, through ir-measures, under our own ranks.

ir-measures hands each measure to a provider, and providers order tied scores in opposite ways and round to float32;
so one run can get RR@10 = 1 beside P@1 = 0. Lists arrive here in ranked order and are re-scored from their ranks:
no ties, small integers, one ranking for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shortlist.errors import DataError, MissingExtraError
from shortlist.metrics.core import Values
from shortlist.metrics.names import PROVIDERS, load_ir_measures

_MAX_LENGTH = 1 << 24  # ranks beyond are not exact in float32


def evaluate_with_providers(
    qrels: Mapping[str, Mapping[str, int]], rankings: Iterable[tuple[str, Sequence[str]]], measures: Sequence[Any]
) -> dict[str, tuple[Values, float]]:
    """Per-query values `(queries,)` and aggregate of each ir-measures object, by its name.

    A query that the run lacks gets the measure's default (0). Negative grades count as 0.

    Raises:
        MissingExtraError: the package of a needed provider does not work here.
    """
    ir_measures = load_ir_measures()
    providers = [ir_measures.providers.registry[name] for name in PROVIDERS]
    provider = ir_measures.providers.FallbackProvider(providers)
    for measure in measures:
        if not any(candidate.supports(measure) and candidate.is_available() for candidate in providers):
            raise MissingExtraError(
                f"{measure} is computed by pytrec_eval, which is not usable here: pip install pytrec-eval-terrier. "
                "nDCG, P, R, RR, AP, Success and Judged work without it."
            )
    grades = {query: {document: max(grade, 0) for document, grade in qrels[query].items()} for query in qrels}
    scored: dict[str, dict[str, float]] = {}
    for query, documents in rankings:
        if len(documents) >= _MAX_LENGTH:
            raise DataError(
                f"query {query!r} ranks {len(documents)} documents; at most {_MAX_LENGTH - 1} can be told apart."
            )
        if query in grades and documents:
            scored[query] = {document: float(len(documents) - rank) for rank, document in enumerate(documents)}

    rows = {query: row for row, query in enumerate(qrels)}
    values = {str(measure): np.zeros(len(rows)) for measure in measures}
    aggregates = {str(measure): measure.aggregator() for measure in measures}
    # ir-measures lets NumRet and nDCG ride along with whichever measure came first, with that one's gains and
    # judged_only, and its order varies; so measures that differ in those are computed apart.
    groups: dict[str, list[Any]] = {}
    for measure in measures:
        groups.setdefault(repr([measure.params.get("judged_only", False), measure.params.get("gains")]), []).append(
            measure
        )
    for group in groups.values():
        for metric in provider.evaluator(group, grades).iter_calc(scored):
            name = str(metric.measure)
            values[name][rows[metric.query_id]] = metric.value
            aggregates[name].add(metric.value)
    return {name: (values[name], float(aggregates[name].result())) for name in values}
