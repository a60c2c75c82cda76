"""`shortlist encode|index|search --engine ray`: the same commands on a Ray cluster."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from shortlist.commands.encode import uses_ray
from shortlist.commands.index import _check_spec, _located, _stored_record, count_prior
from shortlist.data import load_collection
from shortlist.errors import ConfigError
from shortlist.files import refuse_existing
from shortlist.indexes import model_record
from shortlist.manifest import run_manifest
from shortlist.retrieval.cluster import Cluster, connect
from shortlist.retrieval.cluster_encode import encode_on_cluster
from shortlist.retrieval.cluster_index import index_on_cluster
from shortlist.retrieval.cluster_search import ClusterIndex
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DualEncoder
from shortlist.retrieval.encode import TextSource
from shortlist.retrieval.engine import progress_bar
from shortlist.retrieval.store import VectorStore

logger = logging.getLogger(__name__)


def encode_on_ray(
    corpus: TextSource,
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str],
    address: str | None,
    workers: int | None,
    device: str,
    dtype: str,
    **options: Any,
) -> VectorStore:
    """Encode `corpus` on the cluster at `address`, or on a local one; `options` are those of `encode_on_cluster`."""
    with connect(address, cpus=workers) as cluster:
        encoder = _encoder(model, device, dtype)
        return encode_on_cluster(cluster, encoder, corpus, output, device=device, workers=workers, **options)


def index_on_ray(
    *,
    data: str | Path,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    vectors: str | os.PathLike[str] | None = None,
    index: str = "exact",
    address: str | None = None,
    workers: int | None = None,
    shards: int | None = None,
    store_documents: bool = True,
    frequency_prior: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int | None = None,
    on_empty: str = "keep",
    on_error: str = "fail",
    overwrite: bool = False,
) -> dict[str, Any]:
    """`commands.index.index` on a cluster: encoded by its workers, and built in parts, at once.

    Args:
        data: path or name of a collection.
        output: directory to write.
        model: path or name of a dual encoder.
        vectors: output of `shortlist encode`, indexed instead of encoding.
        index: what each part is, such as "exact" or "hnsw".
        address: of the cluster; by default a local one is started.
        workers: processes that encode, and parts that are built at once.
        shards: parts; by default as many as the cluster has nodes.
        store_documents: keep titles and texts beside the vectors.
        frequency_prior: a split whose labels are counted for `search --frequency-bias`.
        device: of the workers.
        dtype: of the model's computation.
        batch_tokens: tokens of one forward pass.
        on_empty: documents without text: keep, skip or error.
        on_error: broken lines: fail or skip.
        overwrite: replace what is at `output`, and a `.partial` of other settings.
    """
    started = time.perf_counter()
    target = Path(output)
    refuse_existing(target, overwrite=overwrite)
    partial = target.with_name(target.name + ".partial")
    prior = None
    with connect(address, cpus=workers) as cluster:
        if vectors is None:
            encoder = _encoder(model, device, dtype)
            _check_spec(index, encoder.dim, prior=frequency_prior is not None)
            collection = load_collection(data, on_empty=on_empty, on_error=on_error)
            if frequency_prior is not None:
                prior = count_prior(collection, frequency_prior, encoder.temperature)
            store = _encode(cluster, encoder, collection.corpus, partial, device, workers, batch_tokens, overwrite)
            record = model_record(encoder, name=str(model))
            # As computed, which need not be here.
            record["dtype"] = store.manifest["dtype"]
        else:
            store = VectorStore.open(vectors)
            _check_spec(index, store.dim, prior=frequency_prior is not None)
            collection = load_collection(data, on_empty=on_empty, on_error=on_error)
            record, temperature = _stored_record(store, Path(vectors), model, target)
            if frequency_prior is not None:
                prior = count_prior(collection, frequency_prior, temperature)
        with progress_bar(len(store), "documents") as bar:
            count = index_on_cluster(
                cluster, store, target, spec=index, workers=workers,
                shards=shards or min(len(cluster.nodes()), max(len(store), 1)),
                model=lambda path: _placed(record, model, path), corpus=collection.corpus if store_documents else None,
                frequency_prior=prior, link=vectors is None, progress=bar.update, overwrite=overwrite,
                provenance=run_manifest(
                    data=collection.name, corpus=collection.corpus.fingerprint, checksums=collection.checksums()
                ),
            )  # fmt: skip
    if vectors is None:
        shutil.rmtree(partial)
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    logger.info(
        "%s holds %s documents in %s bytes; %.1f s, %s documents a second",
        target, f"{count:,}", f"{size:,}", seconds, f"{count / seconds:,.0f}",
    )  # fmt: skip
    return {
        "output": str(target), "index": index, "documents": count, "dim": store.dim, "bytes": size,
        "seconds": round(seconds, 3),
    }  # fmt: skip


def search_on_ray(
    engine: str,
    *,
    index: Any,
    address: str | None = None,
    shards: int | None = None,
    replicas: int | None = None,
    device: str = "auto",
    **options: Any,
) -> Any:
    """`commands.search.search` with the indexes of vectors held by the actors of a cluster; they end with the search.

    Args:
        engine: "ray".
        index: directory of an index, or several.
        address: of the cluster; by default a local one is started.
        shards: parts that an exact index is divided into; by default as many as nodes.
        replicas: actors of each part.
        device: of the actors and of the model.
        options: of `commands.search.search`.

    Raises ConfigError for another engine, or without an index.
    """
    from shortlist.commands.search import search

    if not uses_ray(engine, address=address, shards=shards, replicas=replicas):
        return search(index=index, device=device, **options)
    if not index:
        raise ConfigError("--engine ray searches an index that all nodes see; pass --index.")
    kind = "cuda" if device.startswith("cuda") else device
    opened: list[ClusterIndex] = []
    with connect(address, cpus=(shards or 1) * (replicas or 1)) as cluster:

        def open_index(path: Any) -> ClusterIndex:
            opened.append(ClusterIndex(path, cluster, shards=shards, replicas=replicas or 1, device=kind))
            return opened[-1]

        try:
            return search(index=index, device=device, opener=open_index, **options)
        finally:
            for one in opened:
                one.close()


def _encoder(model: str | os.PathLike[str], device: str, dtype: str) -> DualEncoder:
    """The model on this machine, which need not have the GPUs of the workers."""
    import torch

    here = device if not device.startswith("cuda") or torch.cuda.is_available() else "cpu"
    return DualEncoder.from_pretrained(model, device=here, dtype=dtype)


def _encode(
    cluster: Cluster, encoder: DualEncoder, corpus: Any, partial: Path, device: str, workers: int | None,
    batch_tokens: int | None, overwrite: bool,
) -> VectorStore:  # fmt: skip
    """The vectors in `partial`, going on where an interrupted call stopped."""
    options: dict[str, Any] = {"device": device, "workers": workers, "batch_tokens": batch_tokens}
    try:
        return encode_on_cluster(cluster, encoder, corpus, partial, **options)
    except ConfigError as error:
        if not partial.exists():
            raise
        if not overwrite:
            raise ConfigError(
                f"{error} It holds the unfinished vectors of an earlier `shortlist index`; delete it if they are not "
                "wanted."
            ) from None
        return encode_on_cluster(cluster, encoder, corpus, partial, **options, overwrite=True)


def _placed(record: dict[str, Any], model: str | os.PathLike[str], path: Path) -> dict[str, Any]:
    """`record` with where the model lies, seen from an index at `path`; left out where it is not the model's."""
    return _located(dict(record), model, path) if record.get("name") is not None else dict(record)
