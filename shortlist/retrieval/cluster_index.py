"""Building an index in parts on a Ray cluster: each part by one worker, as an index directory of its own.

The parts grow in `OUTPUT.parts`; a finished one is a checkpoint, which the same call after an interruption keeps. When
all are there they move to the output together with their manifest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shortlist.errors import ConfigError, ShortlistError
from shortlist.files import atomic_directory, refuse_existing, write_json
from shortlist.indexes.build import build_index
from shortlist.indexes.directory import is_index
from shortlist.indexes.frequency import FrequencyPrior
from shortlist.indexes.sharded import part_name, write_sharded
from shortlist.indexes.storage import PROVENANCE
from shortlist.manifest import run_manifest
from shortlist.retrieval.cluster import Cluster, check_count, raise_told, reason, share_cpus, told
from shortlist.retrieval.store import VectorStore

logger = logging.getLogger(__name__)

PLAN = "plan.json"
_SLICE = 4096  # documents read at a time
_RETRIES = 2  # times that a part is begun anew because its worker died
_WHOLE = 8  # shards of vectors a part from which on parts are made of whole shards, which are linked, not copied


@dataclass(frozen=True)
class PartJob:
    """What a worker needs to build one part: rows `start` to `stop` of the vectors at `store`."""

    directory: str
    store: str
    start: int
    stop: int
    spec: str
    model: dict[str, Any]
    prior: FrequencyPrior | None
    corpus: Any
    link: bool


def index_on_cluster(
    cluster: Cluster,
    store: VectorStore,
    output: str | os.PathLike[str],
    *,
    shards: int,
    spec: str = "exact",
    workers: int | None = None,
    model: Callable[[Path], Mapping[str, Any]] | None = None,
    corpus: Any = None,
    frequency_prior: FrequencyPrior | None = None,
    provenance: Mapping[str, Any] | None = None,
    link: bool = False,
    progress: Callable[[int], object] | None = None,
    overwrite: bool = False,
) -> int:
    """Write the vectors of `store` as a `ShardedIndex` of `shards` parts, built at once; returns their number.

    Args:
        cluster: see `cluster.connect`.
        store: finished output of `encode`, seen by all nodes.
        output: directory to write, seen by all nodes.
        shards: parts; no more than there are documents.
        spec: what each part is (see `specs.py`).
        workers: parts that are built at once; by default as many as there are CPUs.
        model: what made the vectors, for an index at the given path (see `model_record`).
        corpus: documents in the order of the vectors, stored beside them; None stores none.
        frequency_prior: becomes one more coordinate of every vector.
        provenance: how it came to be, written as provenance.json.
        link: take whole shards of vectors by hard link; they must never be changed afterwards.
        progress: called with the number of vectors of each finished part.
        overwrite: replace what is at `output`.

    Raises:
        OutputExistsError: `output` exists and `overwrite` is false.
        ConfigError: counts below 1, an unknown spec.
        MissingInputError: a node does not see the vectors, the output or the documents.
        DataError, NonFiniteError: as `build_index`.
        ShortlistError: the worker of one part died three times; finished parts stay.
    """
    check_count("shards", shards)
    check_count("workers", workers)
    refuse_existing(output, overwrite=overwrite)
    target = Path(os.path.realpath(output))
    record = model or (lambda path: {})
    spans = list(_spans(store, shards))
    building = target.with_name(target.name + ".parts")
    _begin(
        building,
        {
            "spec": spec, "spans": [list(span) for span in spans], "vectors": store.fingerprint,
            "corpus": store.manifest.get("corpus"), "documents": getattr(corpus, "fingerprint", corpus is not None),
            "prior": None if frequency_prior is None else frequency_prior.record(), "model": dict(record(target)),
        },
    )  # fmt: skip
    texts = getattr(corpus, "directory", None)
    cluster.check_nodes([store.path, *([] if texts is None else [texts])], writable=building)
    names = [part_name(number) for number in range(len(spans))]
    jobs = [
        PartJob(
            str(building / name), str(store.path.resolve()), start, stop, spec, dict(record(target / name)),
            frequency_prior, corpus, link,
        )
        for name, (start, stop) in zip(names, spans, strict=True)
    ]  # fmt: skip
    todo = [number for number, job in enumerate(jobs) if not is_index(Path(job.directory))]
    for number, (start, stop) in enumerate(spans):
        if number not in todo and progress is not None:
            progress(stop - start)
    if len(todo) < len(jobs):
        logger.info("%d of %d parts were built before", len(jobs) - len(todo), len(jobs))
    for number in _build(cluster, jobs, todo, workers):
        if progress is not None:
            progress(spans[number][1] - spans[number][0])
    (building / PLAN).unlink()
    with atomic_directory(target, overwrite=overwrite) as directory:
        for name in names:
            os.replace(building / name, directory / name)
        # Ids of an encoded corpus are distinct.
        write_sharded(directory, names, distinct=True, model=dict(record(target)))
        if provenance is not None:
            write_json(directory / PROVENANCE, dict(provenance))
    shutil.rmtree(building, ignore_errors=True)
    logger.info("indexed %s vectors of %d dimensions in %s (%d parts, %s)", f"{len(store):,}", store.dim, output,
                len(spans), spec)  # fmt: skip
    return len(store)


def _spans(store: VectorStore, shards: int) -> Iterator[tuple[int, int]]:
    """First and end row of each part: of equal size, and of whole shards of vectors where there are many."""
    if shards > max(len(store), 1):
        raise ConfigError(f"{shards} shards of {len(store)} documents; expected at most one a document.")
    whole = store.num_shards >= _WHOLE * shards
    unit = store.shard_size if whole else 1
    units = store.num_shards if whole else len(store)
    for number in range(shards):
        start, stop = units * number // shards, units * (number + 1) // shards
        yield start * unit, min(stop * unit, len(store))


def _begin(building: Path, plan: Mapping[str, Any]) -> None:
    """Make `building` the place for the parts of `plan`, with what an interrupted call of the same plan left."""
    try:
        found = json.loads((building / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != json.loads(json.dumps(plan)):
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        write_json(building / PLAN, dict(plan))


def _build(cluster: Cluster, jobs: Sequence[PartJob], todo: Sequence[int], workers: int | None) -> Iterator[int]:
    """Build the parts `todo`, some at once; yields the number of each that is finished."""
    if not todo:
        return
    ray = cluster.ray
    nodes = cluster.nodes()
    room = max(1, int(sum(node.cpus for node in nodes)))
    at_once = min(len(todo), workers or room)
    cpus = max(1, share_cpus(nodes, at_once))
    build = ray.remote(_build_part)
    options = {"num_cpus": cpus, "max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
    waiting = list(reversed(todo))
    running: dict[Any, int] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number = waiting.pop()
            running[build.options(**options).remote(jobs[number])] = number
        finished, _ = ray.wait(list(running))
        number = running.pop(finished[0])
        where = f"while building part {number} (rows {jobs[number].start:,} to {jobs[number].stop - 1:,})"
        try:
            problem = ray.get(finished[0])
        except ray.exceptions.RayError as error:
            raise ShortlistError(
                f"the cluster failed {where} ({reason(error)}); finished parts are kept: run the same command to go on."
            ) from None
        if problem is not None:
            raise_told(problem, where)
        yield number


def _build_part(job: PartJob) -> dict[str, str] | None:
    """Runs on a worker: build one part; None, or what went wrong."""
    try:
        if not is_index(Path(job.directory)):  # the worker before this one may have died after it was finished
            store = VectorStore.open_partial(job.store)
            documents = None if job.corpus is None else _documents(job.corpus, job.start, job.stop)
            build_index(
                job.directory, _blocks(store, job.start, job.stop), dim=store.dim, spec=job.spec,
                count=job.stop - job.start, model=job.model, provenance=run_manifest(),
                documents=documents, frequency_prior=job.prior, link=job.link, overwrite=Path(job.directory).exists(),
            )  # fmt: skip
    except Exception as error:  # every failure becomes the sentence of the command
        return told(error)
    return None


def _documents(corpus: Any, start: int, stop: int) -> Iterator[Any]:
    for first in range(start, stop, _SLICE):
        yield from corpus.slice(first, min(first + _SLICE, stop))


def _blocks(store: VectorStore, start: int, stop: int) -> Iterator[tuple[list[str], NDArray[Any]]]:
    """Ids and vectors of rows `start` to `stop`, shard by shard; a whole shard as the mapped file that it is."""
    for number in range(start // store.shard_size, -(-stop // store.shard_size)):
        first, last = store.span(number)
        ids, vectors = store.shard_ids(number), store.vectors(number)
        if start <= first and last <= stop:
            yield ids, vectors
        else:
            low, high = max(start, first) - first, min(stop, last) - first
            yield ids[low:high], vectors[low:high]
