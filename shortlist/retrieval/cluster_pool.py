"""The actors that hold the parts of an index: started, asked, passed over when they die, and started anew."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError, ShortlistError
from shortlist.files import sha256
from shortlist.indexes.kinds import open_index
from shortlist.indexes.sharded import Found, Mask, scan_part
from shortlist.indexes.specs import SearchSettings
from shortlist.indexes.storage import MANIFEST
from shortlist.retrieval.cluster import SHARED, Cluster, Node, raise_told, reason, share_cpus, told

logger = logging.getLogger(__name__)

BATCH = 1024  # queries that are sent, and scored, together
IN_FLIGHT = 3  # batches that are on their way at once, for each replica


@dataclass(frozen=True)
class Part:
    """What one group of replicas answers for: the positions from `start` to `stop` of the whole index.

    `path` is the directory of an index in which they begin at `first`, and `checksum` that of its manifest.
    """

    number: int
    path: str
    start: int
    stop: int
    first: int
    checksum: str

    def __str__(self) -> str:
        return f"part {self.number} (positions {self.start:,} to {self.stop - 1:,} of the index, {self.path})"


@dataclass(frozen=True)
class Masks:
    """What of each part may be returned: None for all of it, False for nothing, else a reference to packed bits."""

    key: str
    parts: Sequence[Any]


@dataclass
class _Replica:
    """One actor of a part; `ready` is the answer that it is awaited for, None once it came."""

    actor: Any
    node: Node
    ready: Any
    since: float = field(default_factory=time.monotonic)


class Pool:
    """Replicas of every part. Several threads may ask at once.

    Raises ShortlistError where a part has no actor in the end.
    """

    def __init__(
        self,
        cluster: Cluster,
        parts: Sequence[Part],
        *,
        replicas: int,
        device: str,
        restarts: int,
        start_seconds: float,
    ):
        self._cluster, self._ray = cluster, cluster.ray
        self._parts = list(parts)
        self._seconds = start_seconds
        self._lock = threading.RLock()
        self._left = [restarts] * len(parts)
        self._reasons = ["it was never started"] * len(parts)
        self._turns = [0] * len(parts)
        nodes = cluster.nodes()
        actors = len(parts) * replicas
        gpus = sum(node.gpus for node in nodes)
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device {device!r} cannot be used on a cluster; expected auto, cpu or cuda.")
        self._device = "cuda" if device == "cuda" or (device == "auto" and gpus >= actors) else "cpu"
        if self._device == "cuda" and gpus < actors:
            raise ConfigError(
                f"{actors} actors need a GPU each, and the cluster has {gpus:g}; use fewer shards or replicas, or "
                "--device cpu."
            )
        self._cpus = share_cpus(nodes, actors)
        if not self._cpus:
            logger.warning("%d actors share the %g CPUs of the cluster", actors, sum(node.cpus for node in nodes))
        self._holder = self._ray.remote(PartHolder)
        self._replicas: list[list[_Replica]] = []
        try:
            # Replicas of a part on different nodes, and parts one after another over all of them.
            for part in self._parts:
                places = [nodes[(part.number + replica) % len(nodes)] for replica in range(replicas)]
                self._replicas.append([self._start(part, node, cpus=self._cpus) for node in places])
            for part in self._parts:
                for replica in list(self._replicas[part.number]):
                    self._await(part, replica, first=True)
        except BaseException:
            self.close()
            raise
        self.replicas = replicas

    def close(self) -> None:
        """End all actors."""
        with self._lock:
            for replica in [replica for group in self._replicas for replica in group]:
                self._kill(replica)
            self._replicas = [[] for _ in self._parts]
            self._left = [0] * len(self._parts)
            self._reasons = ["the index was closed"] * len(self._parts)

    def pids(self) -> list[list[int]]:
        """Process ids of the living actors of each part, as their nodes count them."""
        found: list[list[int]] = []
        for part in self._parts:
            found.append([])
            for replica in list(self._replicas[part.number]):
                try:
                    found[-1].append(self._ray.get(replica.actor.pid.remote()))
                except self._ray.exceptions.RayError as error:
                    self._lose(part, replica, error)
        return found

    def send(self, key: str, allowed: Mask) -> Masks:
        """Put the parts of a mask over all positions on the cluster."""
        sent: list[Any] = []
        for part in self._parts:
            own = allowed[part.start : part.stop]
            if own.all():
                sent.append(None)
            else:
                sent.append(self._ray.put(np.packbits(own, bitorder="little")) if own.any() else False)
        return Masks(key, sent)

    def scan(
        self, queries: NDArray[np.float32], k: int, settings: Mapping[str, Any], masks: Masks
    ) -> Iterator[list[Found]]:
        """What every part found for each batch of `queries`, in order; several batches are on their way at once.

        Raises:
            ShortlistError: a part that no actor answers for; it is named.
        """
        flying: deque[dict[int, tuple[Any, _Replica, tuple[Any, ...]]]] = deque()
        starts = deque(range(0, len(queries), BATCH))
        while starts or flying:
            while starts and len(flying) < IN_FLIGHT * self.replicas:
                start = starts.popleft()
                batch = self._ray.put(queries[start : start + BATCH])
                # A part with nothing to return is not asked.
                flying.append(
                    {
                        part.number: self._ask(part, (batch, k, dict(settings), masks.key, bits))
                        for part, bits in zip(self._parts, masks.parts, strict=True)
                        if bits is not False
                    }
                )
            asked = flying.popleft()
            yield [self._answer(self._parts[number], *sent) for number, sent in asked.items()]

    def _ask(self, part: Part, arguments: tuple[Any, ...]) -> tuple[Any, _Replica, tuple[Any, ...]]:
        replica = self._pick(part)
        return replica.actor.scan.remote(*arguments), replica, arguments

    def _answer(self, part: Part, answer: Any, replica: _Replica, arguments: tuple[Any, ...]) -> Found:
        """The result of a request; where its actor died it is asked again of others, as long as there are any."""
        errors = self._ray.exceptions
        while True:
            try:
                found = self._ray.get(answer)
            except errors.RayTaskError as error:
                raise ShortlistError(f"{part} could not be searched ({reason(error)}); there is no result.") from None
            except errors.RayError as error:
                self._lose(part, replica, error)
                answer, replica, arguments = self._ask(part, arguments)
                continue
            if isinstance(found, dict):
                raise_told(found, f"while searching {part}")
            return found

    def _pick(self, part: Part) -> _Replica:
        """An actor of `part` that is ready, each in turn; waits for one that is being started."""
        with self._lock:
            while True:
                group = self._replicas[part.number]
                if not group:
                    raise ShortlistError(
                        f"no actor is left for {part}: {self._reasons[part.number]}; there is no result, because it "
                        "would lack these documents: start the search again."
                    )
                for replica in list(group):
                    if replica.ready is not None and self._ray.wait([replica.ready], timeout=0)[0]:
                        self._await(part, replica)
                ready = [replica for replica in self._replicas[part.number] if replica.ready is None]
                if ready:
                    self._turns[part.number] += 1
                    return ready[self._turns[part.number] % len(ready)]
                if self._replicas[part.number]:
                    self._await(part, self._replicas[part.number][0])

    def _start(self, part: Part, node: Node, *, cpus: int) -> _Replica:
        actor = self._holder.options(
            num_cpus=cpus,
            num_gpus=1 if self._device == "cuda" else 0,
            max_restarts=0,
            scheduling_strategy=self._cluster.on(node, hard=False),
        ).remote(part, self._device, max(1, self._cpus))
        return _Replica(actor, node, actor.open.remote())

    def _await(self, part: Part, replica: _Replica, *, first: bool = False) -> None:
        """Wait until an actor has opened its part; one that cannot is gone, at the `first` start with its error."""
        seconds = max(0.0, self._seconds - (time.monotonic() - replica.since))
        try:
            problem = self._ray.get(replica.ready, timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            problem = {
                "kind": "ShortlistError",
                "message": f"the actor of {part} did not start within {self._seconds:g} s; the cluster may have no "
                f"free CPU or GPU for it (it asks for {self._cpus}).",
            }
        except self._ray.exceptions.RayError as error:
            self._lose(part, replica, error)
            if first and not self._replicas[part.number]:
                raise ShortlistError(f"the actor of {part} could not be started ({reason(error)}).") from None
            return
        if problem is None:
            replica.ready = None
            return
        self._drop(part, replica, problem["message"])
        if first:
            raise_told(problem, f"while opening {part}")

    def _lose(self, part: Part, replica: _Replica, error: BaseException) -> None:
        """Take a dead actor out, and start another in its place while that is allowed."""
        with self._lock:
            if not self._drop(part, replica, f"the last one died ({reason(error)})"):
                return  # another request has noticed before
            restart = self._left[part.number] > 0
            logger.warning(
                "an actor of part %d died%s", part.number, "; another one is started in its place" if restart else ""
            )
            if restart:
                self._left[part.number] -= 1
                # Without a claim on CPUs: on what is left of the cluster there may be none free.
                self._replicas[part.number].append(self._start(part, self._other(part, replica), cpus=0))

    def _other(self, part: Part, replica: _Replica) -> Node:
        """The node of `replica` if it lives, else one that does."""
        nodes = self._cluster.nodes()
        return next((node for node in nodes if node.id == replica.node.id), nodes[part.number % len(nodes)])

    def _drop(self, part: Part, replica: _Replica, why: str) -> bool:
        with self._lock:
            group = self._replicas[part.number]
            if not any(other is replica for other in group):
                return False
            self._replicas[part.number] = [other for other in group if other is not replica]
            self._reasons[part.number] = why
        self._kill(replica)
        return True

    def _kill(self, replica: _Replica) -> None:
        # One that is dead already is no error.
        if self._ray.is_initialized():
            self._ray.kill(replica.actor, no_restart=True)


class PartHolder:
    """The actor: maps its part and scans it; errors come back as data."""

    def __init__(self, part: Part, device: str, threads: int):
        self._part, self._device, self._threads = part, device, threads
        self._index: Any = None
        self._mask: tuple[str, Mask | None] | None = None

    def open(self) -> dict[str, str] | None:
        """Map the index; None, or what is wrong."""
        import torch

        try:
            part = self._part
            torch.set_num_threads(min(self._threads, os.cpu_count() or 1))
            manifest = os.path.join(part.path, MANIFEST)
            if not os.path.isfile(manifest):
                raise ShortlistError(f"this node does not see {part.path}; {SHARED}.")
            if sha256(manifest) != part.checksum:
                raise ShortlistError(
                    f"{part.path} is not what it was when the search began: it was changed, or this node sees another "
                    "copy; start the search again."
                )
            self._index = open_index(part.path, device=self._device)
        except Exception as error:  # every failure becomes the sentence of the search
            return told(error)
        return None

    def pid(self) -> int:
        """The process of the actor."""
        return os.getpid()

    def scan(
        self,
        queries: NDArray[np.float32],
        k: int,
        settings: Mapping[str, Any],
        key: str,
        bits: NDArray[np.uint8] | None,
    ) -> Found | dict[str, str]:
        """The best `k` of the part for a batch of queries, or what went wrong."""
        try:
            wanted = SearchSettings.from_record(settings)
            if wanted != self._index.settings:
                self._index.settings = wanted
            mask = self._masked(key, bits)
            # A copy: what the object store gives is read-only.
            return scan_part(self._index, np.array(queries), k, mask, self._part.start - self._part.first)
        except Exception as error:  # every failure becomes the sentence of the search
            return told(error)

    def _masked(self, key: str, bits: NDArray[np.uint8] | None) -> Mask | None:
        """Mask over the positions of the opened index: the range of this part, and in it what `bits` allow."""
        if self._mask is None or self._mask[0] != key:
            part, total = self._part, len(self._index._ids)
            count = part.stop - part.start
            mask = None
            if bits is not None or count < total:
                mask = np.zeros(total, bool)
                mask[part.first : part.first + count] = (
                    True if bits is None else np.unpackbits(bits, count=count, bitorder="little").view(bool)
                )
            self._mask = (key, mask)
        return self._mask[1]
