"""Measures of a run against qrels: names, the core measures in NumPy, XC measures, everything else by ir-measures."""

from shortlist.metrics.evaluation import Evaluation, evaluate
from shortlist.metrics.names import is_measure, looks_like_measure, parse_measure
from shortlist.metrics.xc import count_labels, inverse_propensities

__all__ = [
    "Evaluation",
    "count_labels",
    "evaluate",
    "inverse_propensities",
    "is_measure",
    "looks_like_measure",
    "parse_measure",
]
