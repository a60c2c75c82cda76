"""`evaluate`: a run against qrels, with every query counted.

Queries in the qrels that the run lacks count as 0 and are listed; queries in the run without judgements are ignored
and counted; queries without a relevant document are 0 and stay in the mean. The core measures are computed in NumPy
(`core.py`), the rest by ir-measures over the same ranks (`providers.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shortlist.errors import ConfigError, DataError
from shortlist.metrics.core import HitTable, Values, core_measure, judged
from shortlist.metrics.frequency import FrequencyGroup, format_groups, frequency_groups
from shortlist.metrics.names import PSP, measure_object, parse_measure
from shortlist.metrics.providers import evaluate_with_providers
from shortlist.metrics.xc import DEFAULT_PROPENSITY, LabelWeights, propensity_name, propensity_scored_precision
from shortlist.types import Qrels, Run, left_out, string_id

logger = logging.getLogger(__name__)

# Of plain qrels and of XC; a collection names its own (data/).
DEFAULT_MEASURES = ("nDCG@10", "R@100")
XC_MEASURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@100")
ENGINES = ("auto", "ir-measures")
_NO_COUNTS = (
    "{} labels by their training frequency: give train_counts (label id to training count){}, or evaluate with --data "
    "on a collection that has a train split."
)
Judgements = Mapping[Any, Mapping[Any, Any]] | Iterable[Any]


@dataclass(frozen=True)
class Evaluation:
    """Measures of one run: means over all judged queries, values per query, and what was counted.

    Attributes:
        name: name of the run.
        measures: measure names in ir-measures notation, in the order asked for.
        mean: measure → mean over every query of the qrels, 0–1 (a sum for NumRet and its kin).
        per_query: query id → measure → value, missing queries included with 0.
        counts: `queries` (NumQ), `answered`, `missing`, `unjudged`, `without_relevant`, `negative_grades`,
            `Judged@10`; what `exclude_self` and `filters` took out; `cut_short`, the queries whose list reached the
            deepest cut-off before that and not after it; and `emptied`, if there are any.
        settings: what changes the numbers beside the measures: `exclude_self`, `filters`, `binary_gain`, `propensity`.
        missing: ids of judged queries that the run does not answer.
        emptied: ids of judged queries of whose documents in the run `exclude_self` and `filters` left none.
        unjudged: ids of the run's queries without judgements.
        by_frequency: the measures by training frequency of the labels, if they were asked for; else empty.
    """

    name: str
    measures: list[str]
    mean: dict[str, float]
    per_query: dict[str, dict[str, float]] = field(repr=False)
    counts: dict[str, int | float]
    settings: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = field(default=(), repr=False)
    emptied: tuple[str, ...] = field(default=(), repr=False)
    unjudged: tuple[str, ...] = field(default=(), repr=False)
    by_frequency: tuple[FrequencyGroup, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        rows = [("run", self.name), *((name, f"{self.mean[name]:.4f}") for name in self.measures)]
        rows += [(name, format_count(value)) for name, value in self.counts.items()]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        if self.by_frequency:
            table = format_groups(self.by_frequency)
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))]) for row in table]
        return "\n".join(lines + self.notes())

    def notes(self) -> list[str]:
        """Sentences that belong under the table: settings that change the numbers, and queries that do not match."""
        notes = []
        if self.settings.get("exclude_self"):
            notes.append(
                f"exclude_self: a document with the query's own id is removed ({self.counts['self_excluded']} removed)."
            )
        if "filters" in self.settings:
            notes.append(
                "filters: pairs that may not be predicted are removed before ranking; "
                f"{self.counts['filtered']} were in the run."
            )
        if self.counts.get("cut_short"):
            notes.append(
                f"{self.counts['cut_short']} queries have too few documents left for the deepest cut-off; `shortlist "
                "search` with --data removes before it cuts, any other run needs to be written a little deeper."
            )
        if self.settings.get("binary_gain"):
            notes.append("nDCG: every relevance above 0 counts as 1, as extreme classification does.")
        if "propensity" in self.settings:
            used = self.settings["propensity"]
            notes.append(
                f"PSP: propensity A={used['A']}, B={used['B']} (family {used['family']}), {used['num_train']} training "
                "points."
            )
        if self.by_frequency:
            notes.append(
                "deciles: equal numbers of labels, most frequent first; head is decile 1, torso 2 to 5, tail 6 to 10, "
                "zero-shot the labels without a training point. R@k is over the queries with a label of the group; of "
                "the other measures each group shows its summand."
            )
        if self.missing:
            notes.append(f"judged but not in the run, counted as 0: {some_ids(self.missing)}.")
        if self.emptied:
            notes.append(f"in the run, but all their documents were removed, counted as 0: {some_ids(self.emptied)}.")
        if self.unjudged:
            notes.append(f"in the run but not judged, ignored: {some_ids(self.unjudged)}.")
        return notes


def evaluate(
    qrels: Judgements,
    run: Judgements,
    measures: str | Sequence[str] | None = None,
    *,
    exclude_self: bool = False,
    filters: Mapping[str, Iterable[str]] | None = None,
    train_counts: Mapping[str, int] | None = None,
    propensity: tuple[float, float] | None = None,
    num_train: int | None = None,
    by_frequency: bool = False,
    binary_gain: bool = False,
    name: str | None = None,
    engine: str = "auto",
) -> Evaluation:
    """Evaluate `run` against `qrels`; all measures describe one ranking, in the package's one tie order.

    Args:
        qrels: Qrels, `{query: {document: grade}}`, or an iterable of (query, document, grade) or of ir-measures Qrel.
        run: Run, `{query: {document: score}}`, or an iterable of (query, document, score) or of ir-measures ScoredDoc.
        measures: names or aliases; by default nDCG@10 and R@100, or the XC set when `train_counts` is given.
        exclude_self: remove a document that has the query's own id before ranking (ArguAna, Quora). The qrels, and so
            the ideal ranking, stay as they are.
        filters: query id → document ids that may not be predicted (XC filter files), removed before ranking.
        train_counts: label id → number of training points with it; needed by PSP@k and `by_frequency`.
        propensity: (A, B) of PSP@k; 0.55 and 1.5 by default, 0.6 and 2.6 for Amazon, 0.5 and 0.4 for Wikipedia.
        num_train: number of training points; needed by PSP@k.
        by_frequency: also give P@k, R@k, nDCG@k and PSP@k by training frequency of the labels (metrics/frequency.py).
        binary_gain: nDCG@k counts every grade from 1 as 1, as extreme classification does; the grade is the gain
            otherwise.
        name: shown as the run's name instead of its own.
        engine: `auto` computes the core measures in NumPy and the rest through ir-measures; `ir-measures` sends all
            but PSP and binary nDCG there (slower, the same values).

    Raises:
        ConfigError: unknown measure, PSP or `by_frequency` without training counts.
        DataError: empty qrels or run, no query in common, a non-finite score, a document ranked twice.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine is {engine!r}; expected one of {', '.join(ENGINES)}.")
    names = resolve_measures(measures or (XC_MEASURES if train_counts is not None else DEFAULT_MEASURES))
    judgements, results = _as_qrels(qrels), _as_run(run)
    _check_overlap(judgements, results, name or results.name)

    removed = {"self_excluded": 0, "filtered": 0, "cut_short": 0}
    deepest = max((int(cut) for name in names for cut in re.findall(r"@(\d+)$", name)), default=0)
    rankings = dict(_rankings(judgements, results, exclude_self, filters, deepest, removed))
    table = HitTable.build(judgements, rankings.items())
    settings: dict[str, Any] = {}
    if exclude_self:
        settings["exclude_self"] = True
    if filters:
        settings["filters"] = True

    columns: dict[str, tuple[Values, float]] = {}
    others = []
    weights: LabelWeights | None = None
    graded = bool((table.ideal_grade > 1).any())
    for measure in names:
        if measure.startswith(PSP + "@"):
            if weights is None:
                weights, settings["propensity"] = _propensities(table, train_counts, propensity, num_train)
            values = propensity_scored_precision(table, weights, int(measure.partition("@")[2]))
            columns[measure] = (values, float(np.mean(values)))
            continue
        measured = measure_object(measure)
        function: Callable[[HitTable], Values] | None = core_measure(measured)
        flat = binary_gain and graded and measured.NAME == "nDCG"
        if function is None or (engine != "auto" and not flat):
            others.append(measured)
        else:
            settings |= {"binary_gain": True} if flat else {}
            values = function(table.binary() if flat else table)
            columns[measure] = (values, float(np.mean(values)))
    if others:
        columns |= evaluate_with_providers(judgements, rankings.items(), others)

    groups: tuple[FrequencyGroup, ...] = ()
    if by_frequency:
        if train_counts is None:
            raise ConfigError(_NO_COUNTS.format("by_frequency groups", ""))
        groups = frequency_groups(table.binary() if binary_gain else table, names, train_counts, weights)

    without = [table.queries[row] for row in np.flatnonzero(table.lengths == 0)]
    emptied = tuple(query for query in without if len(results.ranking(query)[0]))
    missing = tuple(query for query in without if not len(results.ranking(query)[0]))
    unjudged = tuple(query for query in results if query not in judgements)
    counts: dict[str, int | float] = {
        "queries": len(judgements),
        "answered": len(judgements) - len(without),
        "missing": len(missing),
        "unjudged": len(unjudged),
        "without_relevant": int((table.relevant() == 0).sum()),
        "negative_grades": sum(grade < 0 for documents in judgements.values() for grade in documents.values()),
        "Judged@10": float(np.mean(judged(table, 10))),
    }
    used = (exclude_self, filters, exclude_self or filters)
    counts |= {key: removed[key] for key, shown in zip(removed, used, strict=True) if shown}
    counts |= {"emptied": len(emptied)} if emptied else {}
    if missing:
        logger.info("%d judged queries are not in the run and count as 0: %s", len(missing), some_ids(missing))
    if unjudged:
        logger.info("%d queries of the run have no judgement and are ignored: %s", len(unjudged), some_ids(unjudged))
    rows = zip(*(columns[measure][0].tolist() for measure in names), strict=True)
    return Evaluation(
        name=name or results.name,
        measures=names,
        mean={measure: columns[measure][1] for measure in names},
        per_query={query: dict(zip(names, row, strict=True)) for query, row in zip(table.queries, rows, strict=True)},
        counts=counts,
        settings=settings,
        missing=missing,
        emptied=emptied,
        unjudged=unjudged,
        by_frequency=groups,
    )


def resolve_measures(measures: str | Sequence[str]) -> list[str]:
    """Canonical names of one or several measures, each once, in the order given."""
    given = [measures] if isinstance(measures, str) else measures
    return list(dict.fromkeys(parse_measure(measure) for measure in given))


def some_ids(ids: Sequence[str], most: int = 3) -> str:
    """Up to three ids to show in a message, and how many more there are."""
    shown = ", ".join(repr(one) for one in ids[:most])
    return shown + (f" and {len(ids) - most} more" if len(ids) > most else "")


def format_count(value: int | float) -> str:
    """A count as digits, a share with four decimals."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _rankings(
    qrels: Qrels,
    run: Run,
    exclude_self: bool,
    filters: Mapping[str, Iterable[str]] | None,
    deepest: int,
    removed: dict[str, int],
) -> Iterator[tuple[str, list[str]]]:
    """Document ids best first of each judged query, without its own id and its filtered documents."""
    for query in qrels:
        documents = run.ranking(query)[0]
        out = left_out(query, exclude_self, filters)
        if out and not out.isdisjoint(documents):
            kept = [document for document in documents if document not in out]
            own = exclude_self and query in documents
            removed["self_excluded"] += own
            removed["filtered"] += len(documents) - len(kept) - own
            removed["cut_short"] += len(documents) >= deepest > len(kept)
            documents = kept
        yield query, documents


def _propensities(
    table: HitTable,
    train_counts: Mapping[str, int] | None,
    propensity: tuple[float, float] | None,
    num_train: int | None,
) -> tuple[LabelWeights, dict[str, Any]]:
    if train_counts is None or num_train is None:
        raise ConfigError(_NO_COUNTS.format("PSP@k weighs", " and num_train (number of training points)"))
    a, b = propensity or DEFAULT_PROPENSITY
    weights = LabelWeights.of(table, train_counts, num_train=num_train, propensity=(a, b))
    return weights, {"A": a, "B": b, "num_train": num_train, "family": propensity_name((a, b))}


def _check_overlap(qrels: Qrels, run: Run, name: str) -> None:
    if not len(qrels) or not qrels.num_judgements:
        raise DataError("the qrels hold no judgement; without one nothing can be measured.")
    if not len(run):
        raise DataError(f"run {name!r} holds no query.")
    if not any(query in run for query in qrels):
        raise DataError(
            f"run {name!r} and the qrels have no query id in common: the run has {some_ids(list(run), 2)}, the qrels "
            f"have {some_ids(list(qrels), 2)}. Do they belong to the same collection and split?"
        )


def _as_qrels(qrels: Judgements) -> Qrels:
    if isinstance(qrels, Qrels):
        return qrels
    return Qrels(qrels if isinstance(qrels, Mapping) else _nested(qrels, "relevance", "qrels"))


def _as_run(run: Judgements) -> Run:
    if isinstance(run, Run):
        return run
    return Run(run if isinstance(run, Mapping) else _nested(run, "score", "run"))


def _nested(rows: Iterable[Any], value: str, what: str) -> dict[str, dict[str, Any]]:
    """(query, document, value) rows, or objects with `query_id` and `doc_id`, as nested dictionaries; read once."""
    if not isinstance(rows, Iterable):
        raise DataError(f"{what}: expected a mapping of query to documents, or rows; found {type(rows).__name__}.")
    nested: dict[str, dict[str, Any]] = {}
    for row in rows:
        if hasattr(row, "query_id") and hasattr(row, "doc_id") and hasattr(row, value):
            query, document, number = row.query_id, row.doc_id, getattr(row, value)
        elif isinstance(row, (tuple, list)) and len(row) == 3:
            query, document, number = row
        else:
            raise DataError(f"{what}: expected rows of (query, document, {value}), found {row!r}.")
        documents, id = nested.setdefault(string_id(query, "query"), {}), string_id(document, "document")
        if id in documents:
            raise DataError(f"{what}: document {document!r} appears twice for query {query!r}; keep one of them.")
        documents[id] = number
    return nested
