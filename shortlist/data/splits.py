"""Splitting a development part off the training judgements, without a page on both sides."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shortlist.errors import ConfigError, DataError
from shortlist.types import Qrels

if TYPE_CHECKING:
    from shortlist.data.corpus import Corpus

_HUB = 0.1  # a document relevant to more than this part of the queries says nothing about a common page


def split_off_dev(
    train: Qrels, *, fraction: float = 0.1, groups: Mapping[str, str] | None = None, corpus: Corpus | None = None
) -> tuple[Qrels, Qrels]:
    """(training part, development part) of `train`, about `fraction` of its queries in the second.

    Queries of one group stay together. The group is `groups[query]` where given; otherwise, with a `corpus`, queries
    are tied by a common relevant document or by relevant documents of one title. Documents and titles that more than
    10 % of the queries (and more than 20) share tie nothing, nor does anything if one group would hold more than half
    of the queries. Groups are taken in the order of a hash of their smallest query id, so the choice depends on the
    ids alone, not on order, machine or seed.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"fraction is {fraction}; expected a part between 0 and 1, such as 0.1.")
    if len(train) < 2:
        raise DataError(
            f"the train split has {len(train)} queries; splitting off a development part needs at least two: add a "
            "dev split."
        )
    members = _members(train, groups or {}, corpus)
    target = max(1, round(fraction * len(train)))
    ordered = sorted(members, key=lambda queries: (_hash(min(queries)), min(queries)))
    chosen: set[str] = set()
    for queries in ordered:
        if len(chosen) + len(queries) <= target:
            chosen.update(queries)
    if not chosen:  # every group is larger than the target
        chosen.update(sorted(ordered, key=len)[0])
    name = train.name or "train"
    return (
        _part(train, [query for query in train if query not in chosen], name),
        _part(train, [query for query in train if query in chosen], f"{name} (development part)"),
    )


def _part(qrels: Qrels, queries: list[str], name: str) -> Qrels:
    from shortlist.data.label_qrels import LabelQrels

    if isinstance(qrels, LabelQrels):  # stays a sparse matrix
        rows = {point: row for row, point in enumerate(qrels.point_ids)}
        return LabelQrels(queries, qrels.label_ids, qrels.matrix[[rows[query] for query in queries]], name=name)
    return Qrels({query: qrels[query] for query in queries}, name=name)


def _members(train: Qrels, groups: Mapping[str, str], corpus: Corpus | None) -> list[list[str]]:
    """The queries of each group, by the rule of `split_off_dev`."""
    if any(query in groups for query in train):
        named: dict[tuple[str, str], list[str]] = defaultdict(list)
        for query in train:
            named[("group", groups[query]) if query in groups else ("query", query)].append(query)
        if len(named) < 2:
            raise DataError(
                f"all {len(train)} train queries are in one group ({next(iter(named))[1]!r}); splitting off a "
                "development part needs at least two: add a dev split."
            )
        return list(named.values())
    alone = [[query] for query in train]
    if corpus is None:
        return alone
    components = _components(list(train), _ties(train, corpus))
    return alone if max(map(len, components)) > len(train) / 2 else components


def _ties(train: Qrels, corpus: Corpus) -> list[list[str]]:
    """Queries that share a relevant document, or a title among their relevant documents; hubs left out."""
    sharing: dict[tuple[str, str], list[str]] = defaultdict(list)
    titles = _titles(train, corpus)
    for query in train:
        for document in train.relevant(query):
            sharing["document", document].append(query)
            if titles.get(document):
                sharing["title", titles[document]].append(query)
    limit = max(20, _HUB * len(train))
    return [queries for queries in sharing.values() if 1 < len(queries) <= limit]


def _components(queries: list[str], ties: list[list[str]]) -> list[list[str]]:
    """Connected components of `queries` under `ties` (union-find)."""
    parents = {query: query for query in queries}

    def root(query: str) -> str:
        while parents[query] != query:
            parents[query] = query = parents[parents[query]]
        return query

    for tied in ties:
        for query in tied[1:]:
            parents[root(query)] = root(tied[0])
    components: dict[str, list[str]] = defaultdict(list)
    for query in queries:
        components[root(query)].append(query)
    return list(components.values())


def _titles(train: Qrels, corpus: Corpus) -> dict[str, str]:
    documents = list({document for query in train for document in train.relevant(query)})
    rows = corpus.positions(documents)
    present = [(document, row) for document, row in zip(documents, rows.tolist(), strict=True) if row >= 0]
    titles = corpus.column("title", [row for _, row in present])
    return {document: title.strip().casefold() for (document, _), title in zip(present, titles, strict=True)}


def _hash(query: str) -> bytes:
    return hashlib.blake2b(query.encode("utf-8"), digest_size=8).digest()
