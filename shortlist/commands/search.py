"""`shortlist search`: a run for the queries of a collection or file, or the results of one query on the screen."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shortlist.commands.combine import make_plan, ranked, search_sources, tune_plan
from shortlist.commands.search_output import print_json, print_table
from shortlist.commands.searchers import AnyPath, Source, log_settings, open_sources
from shortlist.data import Collection, load_collection, read_queries, write_run
from shortlist.errors import ConfigError
from shortlist.files import refuse_directory, refuse_existing
from shortlist.indexes import parse_filter
from shortlist.retrieval.fusion_weights import distinct
from shortlist.retrieval.lexical_files import is_bm25
from shortlist.types import Ranked, Run, check_k

logger = logging.getLogger(__name__)


def search(
    *,
    index: AnyPath | Sequence[AnyPath] | None = None,
    model: AnyPath | None = None,
    data: str | Path | None = None,
    bm25: bool = False,
    split: str | None = None,
    query: str | None = None,
    queries: AnyPath | None = None,
    top_k: int = 100,
    output: AnyPath | None = None,
    tag: str | None = None,
    format: str = "trec",
    filter: str | None = None,
    exclude_self: str | bool = "auto",
    fuse: str | None = None,
    weights: str | Sequence[float] | None = None,
    tune_weights: str | None = None,
    depth: int | None = None,
    roll_up: str | None = None,
    parent: str | None = None,
    frequency_bias: float | None = None,
    frequency_prior: str | None = None,
    opener: Callable[[AnyPath], Any] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
    overwrite: bool = False,
) -> Run | list[Ranked]:
    """Search and write a run to `output`; or, with `query`, print the results of one query.

    Pairs that the filter file of the split forbids (extreme classification) are left out before a list is cut at
    `top_k`.

    What is searched: `index`, one or several; or `data` itself, with BM25 (`bm25`) or by encoding it on the fly with
    `model`. Several of them, in this order, are fused.

    Args:
        index: directory made by `shortlist index`, or several; each is searched with the model that built it.
        model: dual encoder of the queries; by default the one the index was built with.
        data: collection, for its queries, titles and texts, and to search without an index.
        bm25: search `data` with BM25.
        split: whose queries; by default the split the collection reports on.
        query: one query text.
        queries: a file of queries (JSON lines or tsv) instead of those of `data`.
        top_k: results a query.
        output: run file to write; `.gz` is compressed.
        tag: name of the run; by default the name of the output.
        format: "trec" or "msmarco".
        filter: which documents may be found: an expression over their fields, such as "year >= 2010".
        exclude_self: leave out the document with the query's own id: "true", "false", or "auto" (the rule of the
            data set).
        fuse: "rrf", "min-max" or "z-score"; by default rrf, and min-max where there are weights.
        weights: one number for each thing searched.
        tune_weights: a split of `data` whose judgements choose the weights.
        depth: documents taken from each list before fusing; 1000 by default, or `top_k` if that is more.
        roll_up: what is indexed are passages; documents get the score of their best one ("max"), their "first", or
            the mean of their best three ("mean") or m ("mean(m)").
        parent: what tells the document of a passage: a separator in its id ("#": D1#3 is of D1), or a field.
        frequency_bias: strength of the frequency prior: added to every score is this times the model's temperature
            times the log of the document's share of the training positives. Negative helps rare documents.
        frequency_prior: the split whose labels are counted for it when `data` is searched without an index; by default
            train. An index holds its own (`shortlist index --frequency-prior`).
        opener: opens an index of vectors in another way, as on a cluster.
        device: of model and index.
        dtype: of the model's computation.
        as_json: print JSON in place of the table.
        overwrite: replace `output`.

    Raises:
        ConfigError: options that exclude each other or are missing, k below 1, a frequency bias without a prior.
        MissingInputError: index, model, collection or split is not there.
        IndexMismatchError: `model` is not the one of the index.
    """
    check_k(top_k)
    if filter is not None:
        parse_filter(filter)  # before anything is read: what is no filter at all
    indexes = [] if index is None else [index] if isinstance(index, (str, os.PathLike)) else list(index)
    searched = len(indexes) + bm25 + (not indexes and (model is not None or not bm25))
    _check_options(indexes, model, data, bm25, split, query, queries, output, tag, format)
    _check_sources(indexes, model, bm25, fuse, weights, tune_weights, data)
    _check_frequency(indexes, bm25, frequency_bias, frequency_prior, searched)
    plan = make_plan(
        searched, top_k, method=fuse, weights=weights, tuned=tune_weights is not None, depth=depth, roll_up=roll_up,
        parent=parent,
    )  # fmt: skip
    if output is not None:
        refuse_directory(output)
        refuse_existing(output, overwrite=overwrite)
    collection = load_collection(data) if data is not None else None
    corpus = collection.corpus if collection is not None else None
    own = _exclude_self(exclude_self, collection)
    name = tag or (_stem(Path(output)) if output is not None else "bm25" if bm25 else "dense")
    # Queries first: a wrong split must fail before anything is encoded.
    texts = _queries(collection, split, queries) if query is None else {}
    prior = (frequency_prior or "train") if frequency_bias is not None else None
    sources = open_sources(
        indexes, model=model, collection=collection, bm25=bm25, device=device, dtype=dtype, bias=frequency_bias,
        prior=prior, opener=opener, filtered=filter is not None,
    )  # fmt: skip
    names = distinct([source.name for source in sources])
    sources = [Source(name, source.searcher) for name, source in zip(names, sources, strict=True)]
    if tune_weights is not None and collection is not None:
        _warn_of_tuning(collection, tune_weights, split, queries, query)
        plan = tune_plan(
            sources, collection.queries(tune_weights), collection.qrels(tune_weights), plan,
            measure=collection.measures[0], filter=filter, exclude_self=own, filters=collection.filters(tune_weights),
        )  # fmt: skip
    if str(plan):
        logger.info("%s: %s", ", ".join(names), plan)
    if query is not None:
        found = search_sources(sources, {"0": query}, top_k, plan, filter=filter, name=name)
        results = ranked(sources, found, "0", corpus)
        if output is not None:
            write_run(found.run, Path(output), tag=tag, format=format)
        print_json(query, results, found.details("0", names)) if as_json else print_table(results)
        return results
    filters = collection.filters(split) if collection is not None and queries is None and collection.splits else None
    if filters:
        logger.info("the filter file of the split leaves %s pairs out", f"{sum(map(len, filters.values())):,}")
    run = search_sources(sources, texts, top_k, plan, filter=filter, exclude_self=own, filters=filters, name=name).run
    for source in sources:
        log_settings(source)
    write_run(run, Path(str(output)), tag=tag, format=format)
    logger.info("wrote %s", output)
    return run


def _check_sources(
    indexes: Sequence[AnyPath], model: Any, bm25: bool, fuse: Any, weights: Any, tune_weights: Any, data: Any
) -> None:
    fused = fuse is not None or weights is not None or tune_weights is not None
    if bm25 and not fused and (indexes or model is not None):
        what = "index" if indexes else "model"
        raise ConfigError(f"--bm25 searches --data itself; leave out --{what}, or fuse the two with --fuse rrf.")
    if bm25 and data is None:
        raise ConfigError("--bm25 searches --data itself; pass --data DIR.")
    if model is not None and len(indexes) > 1:
        raise ConfigError("each of several indexes is searched with the model that built it; leave out --model.")
    if tune_weights is not None and data is None:
        raise ConfigError(f"--tune-weights {tune_weights} names a split of --data; pass --data DIR.")


def _warn_of_tuning(collection: Collection, tuned: str, split: str | None, queries: Any, query: Any) -> None:
    if query is None and queries is None and tuned == (split or collection.default_split):
        logger.warning(
            "the weights are tuned on the split that is searched (%s): do not report measures of this run.", tuned
        )


def _check_options(
    indexes: Sequence[AnyPath], model: Any, data: Any, bm25: bool, split: Any, query: Any, queries: Any, output: Any,
    tag: Any, format: str,
) -> None:  # fmt: skip
    if not indexes and data is None:
        raise ConfigError("nothing to search: pass --index IDX, or --data DIR (with --bm25 or --model).")
    if query is not None and (queries is not None or split is not None):
        raise ConfigError(f"--query is one query; leave out --{'queries' if queries is not None else 'split'}.")
    if queries is not None and split is not None:
        raise ConfigError("--queries names a file and --split a part of --data; pass one of them.")
    if query is not None and not query.strip():
        raise ConfigError("--query is empty; pass the text to search for.")
    if query is not None and not _is_text(query):
        raise ConfigError(f"--query {query!r} is not UTF-8 text; check the encoding of the terminal or the script.")
    if query is None and queries is None and data is None:
        raise ConfigError("no queries: pass --query TEXT, --queries FILE, or --data DIR [--split NAME].")
    if query is None and output is None:
        raise ConfigError("a run goes to a file: pass -o FILE.run.gz (or --query TEXT to see results here).")
    if format not in ("trec", "msmarco"):
        raise ConfigError(f"format is {format!r}; expected trec or msmarco.")
    if tag is not None and len(tag.split()) != 1:
        raise ConfigError(f"tag {tag!r} is empty or holds a blank; a run file's tag is one word.")


def _check_frequency(
    indexes: Sequence[AnyPath], bm25: bool, bias: float | None, prior: str | None, searched: int
) -> None:
    if bias is None and prior is not None:
        raise ConfigError("--frequency-prior names the split that --frequency-bias counts; pass both, or neither.")
    if prior is not None and indexes:
        raise ConfigError("an index holds its own frequency prior; leave out --frequency-prior when searching it.")
    if bias is not None and (bm25 or any(map(is_bm25, indexes))):
        raise ConfigError("--frequency-bias needs vectors; BM25 has none: pass --model, or an index of vectors.")
    if bias is not None and searched > 1:
        raise ConfigError(
            "--frequency-bias is for one index; write a run of each, and fuse them with shortlist.fuse in Python."
        )


def _exclude_self(value: str | bool, collection: Collection | None) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("auto", "true", "false"):
        raise ConfigError(f"exclude_self is {value!r}; expected auto, true or false.")
    return value == "true" or (value == "auto" and collection is not None and collection.exclude_self)


def _queries(
    collection: Collection | None, split: str | None, queries: str | os.PathLike[str] | None
) -> Mapping[str, str]:
    if queries is not None:
        return read_queries(Path(queries))
    if collection is None:
        raise ConfigError("no queries: pass --query TEXT, --queries FILE, or --data DIR [--split NAME].")
    return collection.queries(split)


def _is_text(value: str) -> bool:
    """Whether a command-line value was valid UTF-8: other bytes reach Python as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return "_".join(name.rpartition(".")[0].split() or name.split())
