"""Encoding on a Ray cluster: Ray Data over the numbers of the missing shards, one model a worker.

The finished shard files are the checkpoints. A worker that dies loses the shard it was at and nothing else: Ray starts
another in its place, which redoes that shard and finds all others finished. The bytes are those of `encode_corpus`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shortlist.errors import ConfigError, ShortlistError
from shortlist.retrieval.cluster import Cluster, check_count, raise_told, reason, told
from shortlist.retrieval.device import resolve_dtype
from shortlist.retrieval.encode import (
    TextSource,
    check_part,
    default_shard_size,
    encode_shards,
    fill,
    store_identity,
)
from shortlist.retrieval.engine import EncodingCounts, Forward, default_batch_tokens
from shortlist.retrieval.store import VectorStore, begin

if TYPE_CHECKING:
    from shortlist.retrieval.dual_encoder import DualEncoder

ATTEMPTS = 3  # a shard that ended its worker this often is not tried again
_CPUS_A_WORKER = 4


@dataclass(frozen=True)
class Job:
    """What a worker needs to write shards; `run` names this call in the files of its `attempts` at each."""

    model: str
    corpus: Any
    output: str
    side: str
    device: str
    dtype: str
    batch_tokens: int
    threads: int
    run: str
    attempts: int


def encode_on_cluster(
    cluster: Cluster,
    encoder: DualEncoder,
    corpus: TextSource,
    output_dir: str | os.PathLike[str],
    *,
    side: str = "document",
    device: str = "auto",
    workers: int | None = None,
    shard_size: int | None = None,
    shard: tuple[int, int] | None = None,
    batch_tokens: int | None = None,
    resume: bool = True,
    overwrite: bool = False,
    show_progress: bool | None = None,
) -> VectorStore:
    """`encode_corpus` on a cluster: the same directory, byte for byte, with a model in each of `workers` processes.

    Args:
        cluster: see `cluster.connect`.
        encoder: a dual encoder; the workers get a copy of it through the output directory.
        corpus: the documents (or queries); the workers open the same files.
        output_dir: directory of `manifest.json`, `vectors-*.npy`, `ids-*.json`, seen by all nodes.
        side: "document" or "query".
        device: of the workers: "cpu", "cuda", or "auto" (a GPU each if the cluster has one, else CPUs).
        workers: processes, each with a model; by default one a GPU, or one for every four CPUs.
        shard_size: vectors a file: what a worker does at a time, and at most loses.
        shard: (i, n) writes only the i-th of n parts.
        batch_tokens: tokens of one forward pass, padding included.
        resume: go on with what is there; False refuses an existing directory.
        overwrite: delete what is there.
        show_progress: a progress bar; by default if stderr is a terminal.

    Raises:
        OutputExistsError, ConfigError: see `begin`; or more workers than the cluster has room for.
        MissingInputError: a node does not see the output or the texts.
        NonFiniteError: a vector has a NaN or infinity.
        ShortlistError: a shard ended its worker three times, or the cluster went away; finished shards stay.
    """
    check_count("workers", workers)
    count, threads, kind = _room(cluster, workers, device)
    dtype = _dtype(cluster, encoder.dtype_setting, kind)
    part, parts = check_part(shard)
    budget = default_batch_tokens(torch.device(kind)) if batch_tokens is None else batch_tokens
    forward = Forward(encoder, side, batch_tokens=budget)
    identity = store_identity(
        encoder, corpus, side, device=kind, dtype=dtype, batch_tokens=budget,
        shard_size=shard_size or default_shard_size(len(corpus), parts if parts > 1 else count),
    )  # fmt: skip
    store = begin(output_dir, identity, overwrite=overwrite, resume=resume)

    def run(todo: Sequence[int], counts: EncodingCounts, done: Callable[[int], Any]) -> None:
        if not todo:
            return
        texts = getattr(corpus, "directory", None)
        cluster.check_nodes([] if texts is None else [texts], writable=store.path)
        token = secrets.token_hex(6)
        # The workers' copy of the model; a name that starts with a dot is no part of the store.
        model = store.path / f".{token}.model"
        try:
            job = Job(
                model=str(encoder.save_pretrained(model).resolve()), corpus=corpus, output=str(store.path.resolve()),
                side=side, device=kind, dtype=encoder.dtype_setting, batch_tokens=budget,
                threads=threads, run=token, attempts=ATTEMPTS,
            )  # fmt: skip
            _run(cluster, job, store, todo, min(count, len(todo)), counts, done)
        finally:
            shutil.rmtree(model, ignore_errors=True)
            for mark in store.path.glob(f".{token}.attempt-*"):
                mark.unlink(missing_ok=True)

    fill(store, (part, parts), run, max_length=forward.max_length, show_progress=show_progress)
    return store


def _room(cluster: Cluster, workers: int | None, device: str) -> tuple[int, int, str]:
    """How many workers, the threads of each, and "cpu" or "cuda". Raises ConfigError if they do not fit."""
    nodes = cluster.nodes()
    gpus, cpus = int(sum(node.gpus for node in nodes)), int(sum(node.cpus for node in nodes))
    kind = device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if gpus else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} cannot be used on a cluster; expected auto, cpu or cuda.")
    room, what = (gpus, "GPUs") if kind == "cuda" else (cpus, "CPUs")
    count = workers or (gpus if kind == "cuda" else max(1, cpus // _CPUS_A_WORKER))
    if not 1 <= count <= room:
        raise ConfigError(
            f"{count} workers need one of the cluster's {what} each, and it has {room} on {len(nodes)} nodes; ask for "
            "fewer workers or add nodes."
        )
    local = torch.get_num_threads() if cluster.started or len(nodes) == 1 else cpus
    return count, max(1, local // count), kind


def _dtype(cluster: Cluster, setting: str, kind: str) -> torch.dtype:
    """What `setting` means on the workers' device, which this machine need not have."""
    if kind == "cpu":
        return resolve_dtype(setting, torch.device("cpu"))
    ray = cluster.ray
    name = ray.get(ray.remote(_dtype_name).options(num_cpus=0, num_gpus=1).remote(setting))
    return getattr(torch, name)


def _dtype_name(setting: str) -> str:
    return str(resolve_dtype(setting, torch.device("cuda"))).removeprefix("torch.")


def _run(
    cluster: Cluster,
    job: Job,
    store: VectorStore,
    todo: Sequence[int],
    workers: int,
    counts: EncodingCounts,
    done: Callable[[int], Any],
) -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    left = dict.fromkeys(todo)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shards = ray.data.from_items([{"shard": number} for number in todo], override_num_blocks=len(todo)).map_batches(
            ShardEncoder,
            fn_constructor_kwargs={"job": job},
            batch_size=1,
            num_cpus=1 if job.device == "cpu" else 0,
            num_gpus=1 if job.device == "cuda" else None,
            # One at a time: a worker that dies takes no other shard down, and none waits at a slow worker.
            compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        )
        try:
            for row in shards.iter_rows():
                number = int(row["shard"])
                first, stop = store.span(number)
                if row["error"]:
                    raise_told(
                        json.loads(row["error"]), f"while encoding shard {number} (rows {first:,} to {stop - 1:,})"
                    )
                counts.merge(EncodingCounts(**json.loads(row["counts"])))
                left.pop(number, None)
                done(stop - first)
        except (ray.exceptions.RayError, ray.exceptions.RayTaskError) as error:
            missing = [number for number in left if not store.has(number)]
            raise ShortlistError(
                f"the cluster did not finish {len(missing)} of {len(todo)} shards, the first is "
                f"{missing[0] if missing else todo[0]} ({reason(error)}); finished shards are kept: run the same "
                "command to go on."
            ) from None


class ShardEncoder:
    """The body of a worker: opens the model at its first shard, writes one shard a call, reports errors as data."""

    def __init__(self, job: Job):
        self._job = job
        self._store = VectorStore.open_partial(job.output)
        self._forward: Forward | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Write the shard `batch["shard"]`, unless it is there: its result may have been lost with another node."""
        number = int(batch["shard"][0])
        counts, error = EncodingCounts(), ""
        try:
            if not self._store.has(number):
                self._mark(number)
                for _, found in encode_shards(self._open(), self._job.corpus, self._store, [number]):
                    counts.merge(found)
        except Exception as failure:  # every failure becomes the sentence of the command
            error = json.dumps(told(failure))
        counts.examples = [str(example) for example in counts.examples]
        return {"shard": [number], "counts": [json.dumps(asdict(counts))], "error": [error]}

    def _open(self) -> Forward:
        from shortlist.retrieval.dual_encoder import DualEncoder

        if self._forward is None:
            job = self._job
            torch.set_num_threads(job.threads)
            encoder = DualEncoder.from_pretrained(job.model, device=job.device, dtype=job.dtype)
            if encoder.fingerprint != self._store.fingerprint:
                raise ShortlistError(f"the copy of the model has the fingerprint {encoder.fingerprint}.")
            if str(encoder.dtype) != f"torch.{self._store.manifest['dtype']}":
                raise ConfigError(
                    f"this node would compute in {encoder.dtype}, the vectors were begun in "
                    f"{self._store.manifest['dtype']}: its processor is of another kind; pass --dtype float32."
                )
            self._forward = Forward(encoder, job.side, batch_tokens=job.batch_tokens)
        return self._forward

    def _mark(self, number: int) -> None:
        """Note that this shard is tried, on disk, where the worker that dies of it cannot take it along."""
        for attempt in range(self._job.attempts):
            mark = Path(self._job.output) / f".{self._job.run}.attempt-{number:05d}.{attempt}"
            with suppress(FileExistsError):
                mark.touch(exist_ok=False)
                return
        raise ShortlistError(
            f"shard {number} ended its worker {self._job.attempts} times; usually there was too little memory: use "
            "fewer workers or a smaller batch_tokens. Finished shards are kept; run the same command to go on."
        )
