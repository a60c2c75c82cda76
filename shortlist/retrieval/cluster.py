"""A Ray cluster for the commands: joining one or starting a local one, quietly; and what every node must see.

Ray moves no data of ours: texts, vectors and indexes are files under one path that all nodes share, and only queries,
results and masks travel. What runs on the nodes is in `cluster_encode`, `cluster_index` and `cluster_search`.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shortlist import errors
from shortlist._version import __version__
from shortlist.errors import ConfigError, MissingExtraError, MissingInputError, ShortlistError

logger = logging.getLogger(__name__)

LOCAL_OBJECTS = 512 << 20  # bytes of the object store of a local cluster: results and masks, never vectors
_STARTS = 3  # attempts to start a local cluster
SHARED = "data, model, index and output must lie under one path that all nodes share (a network file system)"

# Nothing is sent anywhere, and a dying worker is our sentence, not a page of Ray's log.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}


@dataclass(frozen=True)
class Node:
    """One living machine of a cluster: its Ray id, address, and the CPUs and GPUs it offers to Ray."""

    id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Cluster:
    """A connection to Ray. `started`: whether it is a local cluster that we started (and stop)."""

    ray: Any
    started: bool

    def nodes(self) -> list[Node]:
        """The living nodes, the one of this process first."""
        own = self.ray.get_runtime_context().get_node_id()
        found = [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                float(node["Resources"].get("CPU", 0)),
                float(node["Resources"].get("GPU", 0)),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]
        return sorted(found, key=lambda node: (node.id != own, node.id))

    def on(self, node: Node, *, hard: bool = True) -> Any:
        """Scheduling strategy that runs a task or actor on `node`; with `hard` false elsewhere if the node is gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node.id, soft=not hard)

    def check_nodes(self, paths: Sequence[str | os.PathLike[str]], *, writable: Path | None = None) -> None:
        """Make sure that every node runs this release and sees the same files.

        Args:
            paths: what every node must see.
            writable: a directory of this machine that every node must see with what is in it just now.

        Raises:
            MissingInputError: a node does not see one of them; names the node and the path.
            ShortlistError: a node cannot run this package, or has another release of it.
        """
        wanted = [str(Path(path).resolve()) for path in paths]
        mark = None
        if writable is not None:
            # A directory may exist on each machine without being the same one.
            mark = writable.resolve() / f".shared-{secrets.token_hex(8)}"
            mark.touch()
            wanted.append(str(mark))
        try:
            look = self.ray.remote(_look)
            nodes = self.nodes()
            asked = [look.options(num_cpus=0, scheduling_strategy=self.on(node)).remote(wanted) for node in nodes]
            for node, answer in zip(nodes, asked, strict=True):
                try:
                    version, missing = self.ray.get(answer)
                except self.ray.exceptions.RayError as error:
                    raise ShortlistError(
                        f"node {node.address} of the Ray cluster cannot run shortlist ({reason(error)}); install the "
                        "same release, with the extra ray, on every node."
                    ) from None
                if version != __version__:
                    raise ShortlistError(
                        f"node {node.address} of the Ray cluster has shortlist {version}, this machine {__version__}; "
                        "install the same release on every node."
                    )
                if missing:
                    path = Path(missing[0]).parent if mark is not None and missing[0] == str(mark) else missing[0]
                    raise MissingInputError(f"node {node.address} of the Ray cluster does not see {path}; {SHARED}.")
        finally:
            if mark is not None:
                mark.unlink(missing_ok=True)


@contextmanager
def connect(address: str | None = None, *, cpus: int | None = None) -> Iterator[Cluster]:
    """A cluster to work on: the one at `address` (or in $RAY_ADDRESS), else a local one that ends with the block.

    A process that is connected already keeps its connection.

    Args:
        address: "auto" for the cluster this machine belongs to, or "HOST:PORT" of its head.
        cpus: tasks that a local cluster runs at once; by default the processors of the machine.

    Raises:
        MissingExtraError: Ray is not installed.
        ShortlistError: no cluster at `address`.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield Cluster(ray, started=False)
        return
    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address or "local", "namespace": "shortlist"}
    if address is None:
        options |= {
            "num_cpus": max(cpus or 0, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": LOCAL_OBJECTS,
        }
    with warnings.catch_warnings(), _silent():
        warnings.simplefilter("ignore")
        for left in reversed(range(_STARTS if address is None else 1)):
            try:
                ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
                break
            except Exception as error:  # Ray raises plain exceptions here
                ray.shutdown()
                # A busy machine may not start everything within the half minute that Ray allows.
                if left:
                    continue
                where = (
                    f"no Ray cluster answers at {address}" if address else "a local Ray cluster could not be started"
                )
                raise ShortlistError(
                    f"{where} ({reason(error)}); start one with `ray start --head` and give its address, or leave "
                    "--address out for a cluster of this machine alone."
                ) from None
    try:
        yield Cluster(ray, started=address is None)
    finally:
        ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what Ray's native code prints on stderr while it starts, which no log level of Python reaches, off it."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def import_ray() -> Any:
    """The ray module, told to be quiet. Raises MissingExtraError if it is not installed."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            f"--engine ray needs Ray, which cannot be imported ({error}); install it with `pip install shortlist[ray]`."
        ) from None
    return ray


def reason(error: BaseException) -> str:
    """The one line of an error that says what happened; Ray's own messages are tracebacks with the cause last."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, BaseException) else error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    name = type(cause if isinstance(cause, BaseException) else error).__name__
    if not lines:
        return name
    return f"{name}: {lines[-1] if 'Traceback' in text or 'ray::' in text else lines[0]}"


def told(error: BaseException) -> dict[str, str]:
    """An error as data, so that it crosses the cluster without pickling its class."""
    known = type(error).__name__ if isinstance(error, ShortlistError) else ""
    return {"kind": known, "message": str(error) if known else f"{type(error).__name__}: {error}"}


def raise_told(record: Mapping[str, str], where: str) -> None:
    """Raise what `told` recorded: errors of this package as they were, others as a ShortlistError with `where`."""
    kind = getattr(errors, record["kind"], None) if record["kind"] else None
    if kind is not None:
        raise kind(record["message"])
    raise ShortlistError(f"a worker failed {where}: {record['message']}")


def share_cpus(nodes: Sequence[Node], actors: int) -> int:
    """The largest whole number of CPUs that each of `actors` can have at once; 0 if not even one."""
    for cpus in range(int(max((node.cpus for node in nodes), default=0)), 0, -1):
        if sum(int(node.cpus // cpus) for node in nodes) >= actors:
            return cpus
    return 0


def check_count(name: str, value: int | None) -> None:
    """Raise ConfigError unless `value` is None or a whole number of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1.")


def _look(paths: list[str]) -> tuple[str, list[str]]:
    """Runs on a node: the release there, and which of `paths` it does not see."""
    return __version__, [path for path in paths if not os.path.exists(path)]
