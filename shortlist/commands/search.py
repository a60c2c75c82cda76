"""`shortlist search`: a run for the queries of a collection or file, or the results of one query on the screen."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shortlist.data import Collection, load_collection, read_queries, write_run
from shortlist.errors import ConfigError, MissingInputError
from shortlist.files import refuse_directory, refuse_existing
from shortlist.types import Ranked, Run, Texts, check_k

logger = logging.getLogger(__name__)

SNIPPET = 160  # characters


class Searcher(Protocol):
    """What both `Retriever` and `LexicalRetriever` are."""

    def search(
        self,
        queries: Texts,
        k: int = 100,
        *,
        exclude_self: bool = False,
        filters: Mapping[str, set[str]] | None = None,
        name: str = ...,
    ) -> Run:
        """The run of `queries`."""
        ...


def search(
    *,
    index: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    data: str | Path | None = None,
    bm25: bool = False,
    split: str | None = None,
    query: str | None = None,
    queries: str | os.PathLike[str] | None = None,
    top_k: int = 100,
    output: str | os.PathLike[str] | None = None,
    tag: str | None = None,
    format: str = "trec",
    exclude_self: str | bool = "auto",
    frequency_bias: float | None = None,
    frequency_prior: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
    overwrite: bool = False,
) -> Run | list[Ranked]:
    """Search and write a run to `output`; or, with `query`, print the results of one query.

    Pairs that the filter file of the split forbids (extreme classification) are left out before a list is cut at
    `top_k`.

    What is searched: `index`; or `data` itself, with BM25 (`bm25`) or by encoding it on the fly with `model`.

    Args:
        index: directory made by `shortlist index`, or a saved BM25 index.
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
        exclude_self: leave out the document with the query's own id: "true", "false", or "auto" (the rule of the
            data set).
        frequency_bias: strength of the frequency prior: added to every score is this times the model's temperature
            times the log of the document's share of the training positives. Negative helps rare documents.
        frequency_prior: the split whose labels are counted for it when `data` is searched without an index; by default
            train. An index holds its own (`shortlist index --frequency-prior`).
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
    _check_options(index, model, data, bm25, split, query, queries, output, tag, format)
    _check_frequency(index, bm25, frequency_bias, frequency_prior)
    if output is not None:
        refuse_directory(output)
        refuse_existing(output, overwrite=overwrite)
    collection = load_collection(data) if data is not None else None
    own = _exclude_self(exclude_self, collection)
    name = tag or (_stem(Path(output)) if output is not None else "bm25" if bm25 else "dense")
    # Queries first: a wrong split must fail before anything is encoded.
    texts = _queries(collection, split, queries) if query is None else {}
    prior = (frequency_prior or "train") if frequency_bias is not None else None
    searcher = _searcher(index, model, collection, bm25, device, dtype, frequency_bias, prior)
    if query is not None:
        results = _rank(searcher, query, top_k, collection)
        if output is not None:
            run = Run({"0": {result.id: result.score for result in results}}, name=name)
            write_run(run, Path(output), tag=tag, format=format)
        _print_json(query, results) if as_json else _print_table(results)
        return results
    filters = collection.filters(split) if collection is not None and queries is None and collection.splits else None
    if filters:
        logger.info("the filter file of the split leaves %s pairs out", f"{sum(map(len, filters.values())):,}")
    started = time.perf_counter()
    run = searcher.search(texts, top_k, exclude_self=own, filters=filters, name=name)
    seconds = time.perf_counter() - started
    logger.info(
        "searched %s queries for %d documents each in %.2f s, %.0f queries a second",
        f"{len(run):,}", top_k, seconds, len(run) / max(seconds, 1e-9),
    )  # fmt: skip
    _log_settings(searcher)
    write_run(run, Path(str(output)), tag=tag, format=format)
    logger.info("wrote %s", output)
    return run


def _log_settings(searcher: Searcher) -> None:
    """What can move a score without being seen in the run: model, prompts, lengths, norm, dtype, frequency bias."""
    prior = getattr(searcher, "frequency_prior", None)
    if prior is not None:
        facts = ", ".join(f"{name} {value!r}" for name, value in prior.items())
        logger.info("frequency bias %s of the prior with %s", getattr(searcher, "frequency_bias", 0.0), facts)
    encoder = getattr(searcher, "encoder", None)
    if encoder is not None:
        settings = ", ".join(f"{name} {value!r}" for name, value in encoder.settings().items())
        logger.info("encoded with fingerprint %s: %s", encoder.fingerprint, settings)


def _check_options(
    index: Any, model: Any, data: Any, bm25: bool, split: Any, query: Any, queries: Any, output: Any, tag: Any,
    format: str,
) -> None:  # fmt: skip
    if index is None and data is None:
        raise ConfigError("nothing to search: pass --index IDX, or --data DIR (with --bm25 or --model).")
    if bm25 and (index is not None or model is not None):
        raise ConfigError(f"--bm25 searches --data itself; leave out --{'index' if index is not None else 'model'}.")
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


def _check_frequency(index: Any, bm25: bool, bias: float | None, prior: str | None) -> None:
    if bias is None and prior is not None:
        raise ConfigError("--frequency-prior names the split that --frequency-bias counts; pass both, or neither.")
    if prior is not None and index is not None:
        raise ConfigError("an index holds its own frequency prior; leave out --frequency-prior when searching it.")
    if bias is not None and (bm25 or (index is not None and _is_bm25(Path(index)))):
        raise ConfigError("--frequency-bias needs vectors; BM25 has none: pass --model, or an index of vectors.")


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


def _searcher(
    index: str | os.PathLike[str] | None, model: Any, collection: Collection | None, bm25: bool, device: str,
    dtype: str, bias: float | None, prior: str | None,
) -> Searcher:  # fmt: skip
    """What answers the queries. Only what is needed is imported: BM25 needs no torch."""
    if bm25 and collection is not None:
        from shortlist.retrieval.lexical import LexicalRetriever

        return LexicalRetriever.build(collection.corpus)
    if index is not None and _is_bm25(Path(index)):
        from shortlist.retrieval.lexical import LexicalRetriever

        if model is not None:
            raise ConfigError(f"{index} is a BM25 index; leave out --model.")
        return LexicalRetriever.open(index)

    from shortlist.indexes import ExactIndex, open_index
    from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DualEncoder
    from shortlist.retrieval.search import Retriever

    corpus = collection.corpus if collection is not None else None
    if index is None:
        encoder = DualEncoder.from_pretrained(model or DEFAULT_MODEL, device=device, dtype=dtype)
        counted = None
        if prior is not None and collection is not None:
            from shortlist.commands.index import count_prior

            counted = count_prior(collection, prior, encoder.temperature)
        built = ExactIndex.build(encoder, corpus, device=device, frequency_prior=counted)
        return Retriever(encoder, built, corpus=corpus, frequency_bias=bias)
    opened = open_index(index, device=device)
    encoder = encoder_of(Path(index), opened.model, model, device, dtype)
    # The index's own store shows what was indexed; the collection is for indexes without one.
    return Retriever(encoder, opened, corpus=None if opened.documents is not None else corpus, frequency_bias=bias)


def _is_bm25(index: Path) -> bool:
    try:
        manifest = json.loads((index / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == "shortlist-bm25"


def encoder_of(index: Path, record: Mapping[str, Any], model: Any, device: str, dtype: str) -> Any:
    """The encoder for the queries of an index: `model` if given, else what its manifest points at."""
    from shortlist.retrieval.dual_encoder import DualEncoder

    if model is not None:
        return DualEncoder.from_pretrained(model, device=device, dtype=dtype)
    name, path = record.get("name"), record.get("path")
    if name is None:
        raise ConfigError(f"{index} does not say which model built it; pass --model MODEL.")
    beside = (index.resolve() / path).resolve() if path else None
    try:
        return DualEncoder.from_pretrained(
            beside if beside is not None and beside.is_dir() else name, device=device, dtype=dtype
        )
    except MissingInputError as error:
        raise MissingInputError(
            f"the model {name!r} (fingerprint {record.get('fingerprint')}) that built {index} was not found: {error} "
            "Pass --model with where it is."
        ) from None


def _is_text(value: str) -> bool:
    """Whether a command-line value was valid UTF-8: other bytes reach Python as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rank(searcher: Any, query: str, k: int, collection: Collection | None) -> list[Ranked]:
    if hasattr(searcher, "rank"):
        return searcher.rank(query, k)
    ids, scores = searcher.search(query, k).ranking("0")
    documents = [collection.corpus.get(id) if collection is not None else None for id in ids]
    return [
        Ranked(id, score, rank, document)
        for rank, (id, score, document) in enumerate(zip(ids, scores.tolist(), documents, strict=True), 1)
    ]


def _print_json(query: str, results: list[Ranked]) -> None:
    rows = [
        {
            "rank": result.rank,
            "id": result.id,
            "score": result.score,
            "title": result.document.title if result.document is not None else None,
            "text": result.document.text if result.document is not None else None,
        }
        for result in results
    ]
    sys.stdout.write(json.dumps({"query": query, "results": rows}, ensure_ascii=False) + "\n")


def _print_table(results: list[Ranked]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("id", overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("title and text", ratio=1)
    for result in results:
        title, text = (result.document.title, result.document.text) if result.document is not None else ("", "")
        # Text, not str: brackets in a document are no markup.
        content = Text(" ".join(title.split()), style="bold")
        content.append(("\n" if content and text else "") + snippet(text), style="not bold")
        table.add_row(str(result.rank), Text(result.id), f"{result.score:.4f}", content)
    console = Console(file=sys.stdout)
    console.print(table)
    if not results:
        logger.info("nothing was found")


def snippet(text: str, length: int = SNIPPET) -> str:
    """The beginning of `text` on one line, cut at a word, at most `length` characters and an ellipsis."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    return (line[:length].rpartition(" ")[0] or line[:length]) + "…"


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return "_".join(name.rpartition(".")[0].split() or name.split())
