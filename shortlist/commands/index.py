"""`shortlist index`: encode a corpus and write the index directory that `search` opens."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shortlist.commands.encode import uses_ray
from shortlist.commands.tune import Targets, print_tuning, run_tuning, sample_texts
from shortlist.data import Collection, load_collection
from shortlist.errors import ConfigError, DataError, IndexMismatchError, MissingInputError
from shortlist.indexes import FrequencyPrior, build_index, model_record, new_index, open_index
from shortlist.indexes.auto import choose
from shortlist.indexes.directory import refuse_output
from shortlist.indexes.frequency import check_inner_product
from shortlist.manifest import run_manifest
from shortlist.metrics import count_labels
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DualEncoder
from shortlist.retrieval.encode import encode_corpus
from shortlist.retrieval.engine import progress_bar
from shortlist.retrieval.store import VectorStore

logger = logging.getLogger(__name__)


def index(
    *,
    data: str | Path,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    vectors: str | os.PathLike[str] | None = None,
    index: str = "exact",
    recall: float | None = None,
    memory: str | None = None,
    latency: str | None = None,
    tune_split: str | None = None,
    tune_queries: str | os.PathLike[str] | None = None,
    store_documents: bool = True,
    frequency_prior: str | None = None,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    shards: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int | None = None,
    on_empty: str = "keep",
    on_error: str = "fail",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Encode the corpus of `data` and index it; returns documents, dimension, bytes and seconds.

    Vectors are written shard by shard to `OUTPUT.partial`; the same call after an interruption goes on with the
    shards that are there and ends with the same bytes (`provenance.json` aside). They then move into the index.

    Args:
        data: path or name of a collection.
        output: index directory to write.
        model: path or name of a dual encoder.
        vectors: output of `shortlist encode`, indexed instead of encoding; its files are copied, not changed.
        index: what to build, such as "exact", "hnsw" or a faiss factory string (see `shortlist.indexes.specs`);
            "auto" chooses it and tunes its search.
        recall: share of the true 10 best that searches must find, 0.95 by default. This or any of the next four tunes
            the search settings of an index that is not chosen, too.
        memory: what searches may keep busy, such as "4GB"; for "auto".
        latency: what half of the single queries may take on one core, such as "5ms".
        tune_split: tune with the queries of this split of `data`; without queries, stored vectors are used.
        tune_queries: tune with the queries of this file (JSON lines or tsv).
        store_documents: keep titles and texts beside the vectors, for showing results.
        frequency_prior: a split whose labels are counted; the log of each document's share is stored as one more
            coordinate, which `search --frequency-bias` weighs.
        engine: "local", or "ray": encoded and built in parts on a cluster (see `ShardedIndex`).
        address: of the Ray cluster; by default a local one is started.
        workers: processes of the cluster that encode, and parts that it builds at once.
        shards: parts; by default as many as the cluster has nodes.
        device: of the model.
        dtype: of the model's computation.
        batch_tokens: tokens of one forward pass.
        on_empty: documents without text: keep, skip or error.
        on_error: broken lines: fail or skip.
        overwrite: replace what is at `output`, and a `.partial` of other settings.
    """
    if uses_ray(engine, address=address, workers=workers, shards=shards):
        from shortlist.commands.engine import index_on_ray

        if index == "auto" or any(value is not None for value in (recall, memory, latency, tune_split, tune_queries)):
            raise ConfigError(
                "an index in parts is not chosen or tuned while it is built: name a kind, such as --index hnsw, and "
                "tune it with `shortlist tune`."
            )
        return index_on_ray(
            data=data, output=output, model=model, vectors=vectors, index=index, address=address, workers=workers,
            shards=shards, store_documents=store_documents, frequency_prior=frequency_prior, device=device, dtype=dtype,
            batch_tokens=batch_tokens, on_empty=on_empty, on_error=on_error, overwrite=overwrite,
        )  # fmt: skip
    started = time.perf_counter()
    target = Path(output)
    refuse_output(target, overwrite=overwrite)
    targets = _targets(index, recall, memory, latency, tune_split, tune_queries)
    sample = sample_texts(data if tune_split is not None else None, tune_split, tune_queries)
    tuning_queries = None
    partial = target.with_name(target.name + ".partial")
    prior = None
    if vectors is None:
        encoder = DualEncoder.from_pretrained(model, device=device, dtype=dtype)
        if index != "auto":
            _check_spec(index, encoder.dim, prior=frequency_prior is not None)
        collection = load_collection(data, on_empty=on_empty, on_error=on_error)
        if index == "auto":
            _choose(targets, len(collection.corpus), encoder.dim + (frequency_prior is not None))
        if sample is not None:
            tuning_queries = encoder.encode_queries(sample[0])
        if frequency_prior is not None:
            prior = count_prior(collection, frequency_prior, encoder.temperature)
        store = _encode(encoder, collection, partial, batch_tokens=batch_tokens, overwrite=overwrite)
        record = _located(model_record(encoder, name=str(model)), model, target)
    else:
        store = VectorStore.open(vectors)
        if index != "auto":
            _check_spec(index, store.dim, prior=frequency_prior is not None)
        if sample is not None:
            tuning_queries = _encode_sample(store, Path(vectors), model, sample[0], device=device, dtype=dtype)
        collection = load_collection(data, on_empty=on_empty, on_error=on_error)
        record, temperature = _stored_record(store, Path(vectors), model, target)
        if frequency_prior is not None:
            prior = count_prior(collection, frequency_prior, temperature)
    _remove_leftovers(target)
    choice = None
    if index == "auto":
        index, choice = _choose(targets, len(store), store.dim + (frequency_prior is not None))
        logger.info("index auto: %s: %s", index, choice)
    building = time.perf_counter()
    with progress_bar(len(store), "documents") as bar:
        count = build_index(
            target,
            _blocks(store),
            dim=store.dim,
            spec=index,
            count=len(store),
            model=record,
            provenance=run_manifest(
                data=collection.name, corpus=collection.corpus.fingerprint, checksums=collection.checksums()
            ),
            documents=collection.corpus if store_documents else None,
            frequency_prior=prior,
            # Our own shards become the index's; files of the user are copied, for they may be changed later.
            link=vectors is None,
            progress=bar.update,
            overwrite=overwrite,
        )
    if vectors is None:
        shutil.rmtree(partial)
    if targets is not None:
        built = round(time.perf_counter() - building, 3)
        opened = open_index(target, device="cpu")
        if len(opened) < 2:
            logger.warning("%d vectors are too few to tune a search with; nothing was measured.", len(opened))
        else:
            where = sample[1] if sample is not None else None
            tuning = run_tuning(opened, targets, tuning_queries, source=where, build_seconds=built, choice=choice)
            opened.commit()
            print_tuning(opened, tuning)
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    logger.info(
        "%s holds %s documents in %s bytes; %.1f s, %s documents a second",
        target, f"{count:,}", f"{size:,}", seconds, f"{count / seconds:,.0f}",
    )  # fmt: skip
    return {
        "output": str(target),
        "index": index,
        "documents": count,
        "dim": store.dim,
        "bytes": size,
        "seconds": round(seconds, 3),
    }


def count_prior(collection: Collection, split: str, temperature: float | None) -> FrequencyPrior:
    """How frequent each document is among the positives of `split`, for a model trained at `temperature`.

    A model that does not say its temperature counts as trained at 1; that is reported.
    """
    qrels = collection.qrels(split)
    if temperature is None:
        logger.info(
            "the model does not record the temperature it was trained with; the frequency prior takes 1, so that a "
            "frequency bias is in units of the score."
        )
    prior = FrequencyPrior(
        count_labels(qrels), len(collection.corpus), temperature or 1.0, {"split": split, "queries": len(qrels)}
    )
    logger.info(
        "frequency prior: %s positives of %s queries (split %s), %s of %s documents have one, temperature %s",
        f"{prior.positives:,}", f"{len(qrels):,}", split, f"{len(prior.counts):,}", f"{prior.documents:,}",
        prior.temperature,
    )  # fmt: skip
    return prior


def _targets(
    index: str, recall: float | None, memory: str | None, latency: str | None, split: str | None, queries: Any
) -> Targets | None:
    """What searches of the index must reach; None where nothing is asked."""
    if memory is not None and index != "auto":
        raise ConfigError(f"--memory is what --index auto chooses by; the index is {index!r}.")
    if index != "auto" and recall is None and latency is None and split is None and queries is None:
        return None
    return Targets.parse(recall, memory, latency, None)


def _choose(targets: Targets | None, count: int, dim: int) -> tuple[str, str]:
    """The spec for `count` vectors, and why."""
    wanted = targets or Targets()
    choice = choose(count, dim, recall=wanted.recall, memory=wanted.memory, latency=wanted.latency, k=wanted.k)
    return choice.spec, choice.reason


def _encode_sample(
    store: VectorStore, vectors: Path, model: str | os.PathLike[str], texts: list[str], *, device: str, dtype: str
) -> Any:
    """Vectors of the queries to tune with, by the model that made the stored vectors."""
    encoder = DualEncoder.from_pretrained(model, device=device, dtype=dtype)
    if encoder.fingerprint != store.fingerprint:
        raise IndexMismatchError(
            f"{model} (fingerprint {encoder.fingerprint}) did not make the vectors in {vectors} (fingerprint "
            f"{store.fingerprint}), so it cannot encode the queries to tune with; pass --model, or give no queries."
        )
    return encoder.encode_queries(texts)


def _check_spec(spec: str, dim: int, *, prior: bool) -> None:
    """A wrong spec must fail before hours of encoding."""
    empty = new_index(spec, dim + prior)
    if prior:
        check_inner_product(empty)


def _encode(
    encoder: DualEncoder, collection: Collection, partial: Path, *, batch_tokens: int | None, overwrite: bool
) -> VectorStore:
    """The vectors in `partial`, going on where an interrupted call stopped."""
    try:
        return encode_corpus(encoder, collection.corpus, partial, batch_tokens=batch_tokens)
    except ConfigError as error:
        if not partial.exists():
            raise
        if not overwrite:
            raise ConfigError(
                f"{error} It holds the unfinished vectors of an earlier `shortlist index`; delete it if they are not "
                "wanted."
            ) from None
        return encode_corpus(encoder, collection.corpus, partial, batch_tokens=batch_tokens, overwrite=True)


def _blocks(store: VectorStore) -> Iterator[tuple[list[str], Any]]:
    yield from store


def _located(record: dict[str, Any], model: str | os.PathLike[str], target: Path) -> dict[str, Any]:
    """`record` with where a model folder lies, relative to the index, so that both can move together."""
    folder = Path(model)
    if folder.is_dir():
        try:
            record["path"] = Path(os.path.relpath(folder.resolve(), target.resolve())).as_posix()
        except ValueError:
            # On Windows there is no relative path to another drive; search then needs --model.
            return record
    return record


def _stored_record(
    store: VectorStore, vectors: Path, model: str | os.PathLike[str], target: Path
) -> tuple[dict[str, Any], float | None]:
    """What `encode` recorded about the model, and where the model is and its temperature if `model` is the one."""
    if store.manifest.get("side", "document") != "document":
        raise DataError(f"{vectors} holds vectors of queries; an index needs those of documents: encode them.")
    keys = (
        "dim", "fingerprint", "prompts", "query_max_length", "doc_max_length", "pooling", "normalise", "similarity",
        "template", "document_side", "documents", "dtype",
    )  # fmt: skip
    record = {"name": None, **{key: store.manifest[key] for key in keys if key in store.manifest}}
    try:
        encoder = DualEncoder.from_pretrained(model, device="cpu")
    except MissingInputError:
        encoder = None
    if encoder is not None and encoder.fingerprint == store.fingerprint:
        name = model_record(encoder, name=str(model))["name"]
        return _located({**record, "name": name}, model, target), encoder.temperature
    logger.warning(
        "the vectors in %s (fingerprint %s) were not made by %s; the index does not know its model, so `search` will "
        "need --model.",
        vectors, store.fingerprint, model,
    )  # fmt: skip
    return record, None


def _remove_leftovers(target: Path) -> None:
    """Remove what a killed call left beside `target` under a temporary name."""
    for folder in target.parent.glob(f".{target.name}.tmp.*"):
        shutil.rmtree(folder, ignore_errors=True)
