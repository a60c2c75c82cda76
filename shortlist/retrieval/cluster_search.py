"""Searching on a Ray cluster: actors hold the parts of an index, every batch of queries goes to all of them.

A part is a part of a sharded index, or a range of the positions of an exact index; it is memory-mapped by as many
actors as it has replicas, on different nodes where there are several. Each part gives its best `k`, and those are
merged by score and then id, so that exact parts give the results of one exact index. An actor that dies is passed over
for another replica and started anew; a part that nobody can answer for is an error. An answer is complete or there is
none.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shortlist.errors import ConfigError
from shortlist.files import sha256
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.blocks import VectorBlocks, Vectors
from shortlist.indexes.kinds import open_index
from shortlist.indexes.sharded import Found, Mask, ShardedIndex, merge_found
from shortlist.indexes.specs import SearchSettings
from shortlist.indexes.storage import MANIFEST
from shortlist.retrieval.cluster import Cluster, check_count
from shortlist.retrieval.cluster_pool import Masks, Part, Pool

_ALIGNED = 64  # positions: ranges begin where the rows of a scan do, so that scores are the very same
_KEPT_MASKS = 4


class ClusterIndex(VectorIndex):
    """An index whose searches are done by the actors of a cluster; all else is as of the index at `path`.

    What is removed here is left out of the next search. It is not written: open the index without a cluster for that.

    Args:
        path: a sharded index, or any other one; all nodes see it under this path.
        cluster: see `cluster.connect`.
        shards: parts that an exact index is divided into; by default as many as nodes. A sharded index has its own,
            and an index of another kind is one.
        replicas: actors of each part.
        device: of the actors: "cpu", "cuda" (a GPU each), or "auto" (that, if the cluster has so many).
        restarts: times that the actors of one part are started anew before its loss is an error.
        start_seconds: how long the start of an actor may take.

    Raises:
        MissingInputError, DataError: no index at `path`, or a node does not see it.
        ConfigError: shards of an index that cannot be divided; counts below 1.
        ShortlistError: the actors could not be started.
    """

    kind = "cluster"
    metrics = ("ip", "l2")
    # Filters that leave few documents are the business of the actors.
    _only_vectors = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        cluster: Cluster,
        *,
        shards: int | None = None,
        replicas: int = 1,
        device: str = "cpu",
        restarts: int = 3,
        start_seconds: float = 120.0,
    ):
        check_count("shards", shards)
        check_count("replicas", replicas)
        index = open_index(path, device="cpu")
        super().__init__(index.dim, metric=index.metric)
        self.index = index
        self.model, self.frequency_prior, self.tuning = index.model, index.frequency_prior, index.tuning
        self.documents = index.documents
        self.lossless, self._keeps_vectors = index.lossless, index._keeps_vectors
        self._ids, self._spec = index._ids, index.spec
        self._search_settings = index.settings
        self._sent: OrderedDict[bytes, Masks] = OrderedDict()
        self.parts = divide(index, Path(path).resolve(), shards, nodes=len(cluster.nodes()))
        cluster.check_nodes([Path(path) / MANIFEST])
        self._pool = Pool(
            cluster, self.parts, replicas=replicas, device=device, restarts=restarts, start_seconds=start_seconds
        )

    def close(self) -> None:
        """End the actors."""
        self._pool.close()

    def __enter__(self) -> ClusterIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _scan(self, queries: Vectors, k: int, allowed: Mask | None) -> Found:
        asked = self._pool.scan(queries, k, self.settings.record(), self._masks(allowed))
        merged = [merge_found(found, k, self._ids.take) for found in asked]
        positions, scores, counts = (np.concatenate(column) for column in zip(*merged, strict=True))
        return positions, scores, counts

    def _masks(self, allowed: Mask | None) -> Masks:
        """What of each part may be returned, sent to the cluster once for all batches and for the next searches."""
        if allowed is None:
            return Masks("", [None] * len(self.parts))
        key = hashlib.blake2b(np.packbits(allowed).tobytes(), digest_size=16).digest()
        masks = self._sent.get(key)
        if masks is None:
            masks = self._pool.send(key.hex(), allowed)
            self._sent[key] = masks
            while len(self._sent) > _KEPT_MASKS:
                self._sent.popitem(last=False)
        return masks

    @property
    def settings(self) -> SearchSettings:
        """How thoroughly each part is searched; set it to change that from the next search on."""
        return self._search_settings

    @settings.setter
    def settings(self, value: SearchSettings) -> None:
        self.index.settings = value  # which checks it
        self._search_settings = value

    def stats(self) -> dict[str, Any]:
        """Those of the index."""
        return self.index.stats()

    def transforms(self) -> list[str]:
        """Those of the index."""
        return self.index.transforms()

    def _vectors_at(self, positions: NDArray[np.int64]) -> Vectors:
        return self.index._vectors_at(positions)

    def _base_size(self) -> int:
        return len(self._ids)

    def _settings(self) -> dict[str, Any]:
        return self.index._settings()

    # An index on a cluster is read only.

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Refused: an index on a cluster is only searched."""
        self._refuse()

    def commit(self) -> int:
        """Refused: an index on a cluster is only searched."""
        self._refuse()

    def compact(self) -> None:
        """Refused: an index on a cluster is only searched."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError("an index on a cluster is only searched; open it with open_index(path) to change it.")

    def _append(self, vectors: Vectors) -> None:
        self._refuse()

    def _open_base(self, segment: Path, vectors: VectorBlocks | None, count: int) -> None:
        self._refuse()

    def _open_tail(self, blocks: VectorBlocks) -> None:
        self._refuse()

    def _clear(self) -> None:
        self._refuse()


def divide(index: VectorIndex, path: Path, shards: int | None, *, nodes: int) -> list[Part]:
    """The parts of an opened index. Raises ConfigError for `shards` of an index that is not divided that way."""
    total = len(index._ids)
    if isinstance(index, ShardedIndex):
        if shards not in (None, len(index.parts)):
            raise ConfigError(
                f"{path} was built in {len(index.parts)} parts and is searched in those; leave out --shards."
            )
        stops = [*index.starts[1:], total]
        folders = [path / entry["name"] for entry in index._stored["parts"]]
        return [
            Part(number, str(folder), start, stop, 0, sha256(folder / MANIFEST))
            for number, (folder, start, stop) in enumerate(zip(folders, index.starts, stops, strict=True))
        ]
    checksum = sha256(path / MANIFEST)
    if index.kind != "exact":
        if shards not in (None, 1):
            raise ConfigError(
                f"{path} is of kind {index.spec}, which cannot be divided; build it in parts (`shortlist index "
                "--engine ray --shards N`), or leave out --shards and use --replicas."
            )
        return [Part(0, str(path), 0, total, 0, checksum)]
    count = max(1, min(shards or nodes, -(-total // _ALIGNED)))
    step = -(-total // count // _ALIGNED) * _ALIGNED if total else 1
    starts = range(0, max(total, 1), step)
    return [
        Part(number, str(path), start, min(start + step, total), start, checksum) for number, start in enumerate(starts)
    ]
