"""From one or several searchers to one run: search each, roll passages up to documents, fuse."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shortlist.commands.searchers import Source
from shortlist.errors import ConfigError
from shortlist.retrieval.fusion import RRF_K, check_method, fuse, scale_weights
from shortlist.retrieval.rollup import WAYS, Parents, check_how, field_parents, parent_of, search_documents
from shortlist.types import Qrels, Ranked, Run, check_k

logger = logging.getLogger(__name__)

FUSION_DEPTH = 1000  # documents taken from each list, unless told otherwise


@dataclass(frozen=True)
class Plan:
    """How the lists of the sources become one.

    Attributes:
        method: of fusion, None where there is one source.
        weights: one a source, None for equal ones.
        depth: documents taken from each list before fusing.
        how: roll-up, None for none.
        top: passages of the roll-up "mean".
        parent: separator, or name of a field, that tells the document of a passage.
    """

    method: str | None = None
    weights: tuple[float, ...] | None = None
    depth: int = FUSION_DEPTH
    how: str | None = None
    top: int = 3
    parent: str | None = None

    def __str__(self) -> str:
        parts = []
        if self.how is not None:
            way = f"mean of {self.top}" if self.how == "mean" else self.how
            parts.append(f"passages rolled up to documents by {way}, parent {self.parent!r}")
        if self.method is not None:
            constant = f" (k {RRF_K})" if self.method == "rrf" else ""
            weights = (
                "equal weights" if self.weights is None else "weights " + ", ".join(map("{:g}".format, self.weights))
            )
            parts.append(f"fused by {self.method}{constant}, {weights}, {self.depth:,} documents of each list")
        return "; ".join(parts)


def make_plan(
    sources: int,
    k: int,
    *,
    method: str | None,
    weights: str | Sequence[float] | None,
    tuned: bool,
    depth: int | None,
    roll_up: str | None,
    parent: str | None,
) -> Plan:
    """The plan of the command line's options for `sources` searchers. Raises ConfigError for what does not fit."""
    if sources < 2:
        given = {"--fuse": method, "--weights": weights, "--tune-weights": tuned or None, "--depth": depth}
        name = next((name for name, value in given.items() if value is not None), None)
        if name is not None:
            raise ConfigError(
                f"{name} is for fusing lists, and one thing is searched; pass --index twice, or --bm25 beside it."
            )
    elif method is None:
        method = "rrf" if weights is None and not tuned else "min-max"
    if method is not None:
        check_method(method, RRF_K)
    if weights is not None and tuned:
        raise ConfigError("--weights gives the weights and --tune-weights finds them; pass one of them.")
    values = None if weights is None else tuple(_numbers(weights))
    scale_weights(values, sources)
    if (roll_up is None) != (parent is None):
        raise ConfigError(
            "--roll-up and --parent go together: how passages become documents, and what tells the document of a "
            "passage: a separator in the id such as '#', or a field of the stored documents."
        )
    how, top = (None, 3) if roll_up is None else _way(roll_up)
    wanted = max(k, FUSION_DEPTH) if depth is None else check_k(depth)
    return Plan(method, values, wanted, how, top, parent)


@dataclass(frozen=True)
class Combined:
    """The run, the run of each source before fusing, and for each source the best passage of a document."""

    run: Run
    parts: list[Run]
    passages: list[dict[str, str]]

    def details(self, query: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What to say about each document of `query`: its rank in each source, its best passage."""
        facts: dict[str, dict[str, Any]] = {id: {} for id in self.run.ranking(query)[0]}
        if len(self.parts) > 1:
            places = [{id: rank for rank, id in enumerate(part.ranking(query)[0], 1)} for part in self.parts]
            for id, fact in facts.items():
                fact["ranks"] = {name: place.get(id) for name, place in zip(names, places, strict=True)}
        for id, fact in facts.items():
            passage = next((found[id] for found in self.passages if id in found), None)
            if passage is not None:
                fact["passage"] = passage
        return facts


def search_sources(
    sources: Sequence[Source],
    texts: Mapping[str, str],
    k: int,
    plan: Plan,
    *,
    filter: Any = None,
    exclude_self: bool = False,
    filters: Mapping[str, set[str]] | None = None,
    name: str = "run",
) -> Combined:
    """Search `texts` in each source and combine; each source's speed is logged."""
    depth = plan.depth if plan.method is not None else k
    parts, passages = [], []
    for source in sources:
        started = time.perf_counter()
        own = source.name if plan.method is not None else name
        if plan.how is None:
            part = source.searcher.search(
                texts, depth, filter=filter, exclude_self=exclude_self, filters=filters, name=own
            )
        else:
            parents = parents_of(source, str(plan.parent))
            recorder = _Recorder(source)
            part = search_documents(
                recorder, texts, depth, parents, how=plan.how, top=plan.top, filter=filter, exclude_self=exclude_self,
                filters=filters, name=own,
            )  # fmt: skip
            passages.append(recorder.best(parents) if len(texts) == 1 else {})
        parts.append(part)
        seconds = time.perf_counter() - started
        if len(texts) == 1:
            continue
        logger.info(
            "%ssearched %s queries for %d documents each in %.2f s, %.0f queries a second",
            f"{source.name}: " if len(sources) > 1 else "", f"{len(part):,}", depth, seconds,
            len(part) / max(seconds, 1e-9),
        )  # fmt: skip
    if plan.method is None:
        return Combined(parts[0], parts, passages)
    fused = fuse(parts, method=plan.method, weights=plan.weights, name=name)
    return Combined(fused.top(k), parts, passages)


def tune_plan(
    sources: Sequence[Source],
    texts: Mapping[str, str],
    qrels: Qrels,
    plan: Plan,
    *,
    measure: str,
    **options: Any,
) -> Plan:
    """`plan` with the weights that are best for the judged queries `texts`."""
    from shortlist.retrieval.fusion_weights import tune_weights

    parts = search_sources(sources, texts, plan.depth, replace(plan, weights=None), **options).parts
    found = tune_weights(parts, qrels, measure=measure, method=str(plan.method), k=RRF_K)
    logger.info("%s", found)
    return replace(plan, weights=found.values)


def ranked(sources: Sequence[Source], combined: Combined, query: str, corpus: Any) -> list[Ranked]:
    """The results of one query with their documents: the document itself, or its best passage."""
    ids, scores = combined.run.ranking(query)
    shown = [_document(id, sources, combined.passages, corpus) for id in ids]
    return [
        Ranked(id, score, rank, document)
        for rank, (id, score, document) in enumerate(zip(ids, scores.tolist(), shown, strict=True), 1)
    ]


def parents_of(source: Source, parent: str) -> Parents:
    """What `--parent` means: a separator, or a field if it is a word."""
    if parent.isidentifier() and any(map(str.isalnum, parent)):
        return field_parents(source.searcher, parent)
    return parent


class _Recorder:
    """A searcher that keeps its last run, to know which passages were found."""

    def __init__(self, source: Source):
        self._searcher = source.searcher
        self._last = Run()

    def search(self, queries: Any, k: int = 100, *, filter: Any = None) -> Run:
        self._last = self._searcher.search(queries, k, filter=filter)
        return self._last

    def best(self, parents: Parents) -> dict[str, str]:
        """Document id → its best passage, over the queries of the last run."""
        parent, found = parent_of(parents), dict[str, str]()
        for query in self._last:
            for passage in self._last.ranking(query)[0]:
                found.setdefault(parent(passage), passage)
        return found


def _document(id: str, sources: Sequence[Source], passages: Sequence[Mapping[str, str]], corpus: Any) -> Any:
    names = [id, *(found[id] for found in passages if id in found)]
    for name in names:
        for source in sources:
            document = source.searcher.document(name)
            if document is not None:
                return document
        if corpus is not None and (document := corpus.get(name)) is not None:
            return document
    return None


def _numbers(weights: str | Sequence[float]) -> list[float]:
    if not isinstance(weights, str):
        return list(weights)
    try:
        return [float(part) for part in weights.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {weights!r}: expected one number an index, such as 0.3,0.7.") from None


def _way(text: str) -> tuple[str, int]:
    """`max`, `first`, `mean` or `mean(5)`."""
    match = re.fullmatch(r"([a-z]+)(?:\((\d{1,9})\))?", text)
    if match is None or (match[2] is not None and match[1] != "mean"):
        raise ConfigError(f"--roll-up {text!r}: expected {', '.join(WAYS)}, or mean(m) for the mean of the best m.")
    top = 3 if match[2] is None else int(match[2])
    check_how(match[1], top)
    return match[1], top
