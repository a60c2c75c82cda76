"""Exact top k over blocks of vectors with torch: every score is computed, in chunks within a memory budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shortlist.indexes.blocks import Vectors
from shortlist.indexes.topk import TakeIds, TopK

Mask = NDArray[np.bool_]
Found = tuple[NDArray[np.int64], Vectors, NDArray[np.int64]]

QUERIES = 1024  # queries scored together
_CPU_SCORES = 4 << 20  # scores of one chunk; 16 MB stay in cache between the product and the filter
_DEVICE_SCORES = 128 << 20
# Matrix products add up in another order in the last columns of a width that fills no whole tile. With widths of
# whole tiles equal vectors get equal scores wherever they stand, so that the tie rule can order them.
EQUAL_WIDTH = 64
_SPARSE = 4  # a chunk with fewer than one allowed document in so many is narrowed to those


class DeviceBlocks:
    """Blocks of rows as tensors on a device; on an accelerator they stay there while they fit in its memory.

    Args:
        device: where scores are computed.
        keep: whether blocks stay on the device; None: where it is an accelerator, up to 70 % of its free memory.
    """

    def __init__(self, device: torch.device, *, keep: bool | None = None):
        self.device = device
        self._keep = device.type == "cuda" if keep is None else keep
        self._held: dict[int, torch.Tensor] = {}
        # Bytes that may still be held; found out when the first block comes.
        self._room: float | None = None if keep is None else math.inf

    def rows(self, number: int, block: NDArray[Any], start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of `block`, the `number`-th of its list, which may have grown since the last call."""
        held = self._held.get(number)
        if self._keep and (held is None or len(held) < stop):
            held = self._hold(number, block, held)
        return torch.from_numpy(block[start:stop]).to(self.device) if held is None else held[start:stop]

    def _hold(self, number: int, block: NDArray[Any], held: torch.Tensor | None) -> torch.Tensor | None:
        if self._room is None:
            self._room = 0.7 * torch.cuda.mem_get_info(self.device)[0]
        new = block[0 if held is None else len(held) :]
        if new.nbytes > self._room:
            self._held.pop(number, None)
            return None
        self._room -= new.nbytes
        # A copy in any case: on a CPU `to` would give a view of memory that its owner goes on writing to.
        fresh = torch.from_numpy(np.array(new)).to(self.device)
        self._held[number] = fresh if held is None else torch.cat([held, fresh])
        return self._held[number]


class Chunk:
    """A piece of a list of blocks: rows `start` to `stop` of block `number`; its first row is position `offset`.

    `inside` holds the rows that are searched, counted from the first; None: all of them.
    """

    def __init__(self, number: int, start: int, stop: int, offset: int, inside: NDArray[np.int64] | None):
        self.number, self.start, self.stop, self.offset, self.inside = number, start, stop, offset, inside
        self.size = stop - start if inside is None else len(inside)

    def positions(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions in the index of `columns` of the chunk's scores."""
        return (columns if self.inside is None else self.inside[columns]) + self.offset


def chunks(lengths: Sequence[int], size: int, allowed: Mask | None) -> Iterator[tuple[Chunk, Mask | None]]:
    """Pieces of at most `size` rows, a multiple of EQUAL_WIDTH but for the end of a block, and their part of the mask.

    Pieces with nothing allowed are left out; one with few allowed rows is narrowed to them (its mask is None).
    """
    offset = 0
    for number, length in enumerate(lengths):
        even = length // EQUAL_WIDTH * EQUAL_WIDTH
        starts = [*range(0, even, size), *([even] if even < length else [])]
        for start in starts:
            stop = min(start + size, even) if start < even else length
            here = None if allowed is None else allowed[offset + start : offset + stop]
            count = stop - start if here is None else int(np.count_nonzero(here))
            if not count:
                continue
            if count == stop - start:
                yield Chunk(number, start, stop, offset + start, None), None
            elif here is not None and count * _SPARSE <= stop - start:
                yield Chunk(number, start, stop, offset + start, np.flatnonzero(here)), None
            else:
                yield Chunk(number, start, stop, offset + start, None), here
        offset += length


def chunk_rows(device: torch.device, queries: int) -> int:
    """Rows of a chunk so that its scores `(queries, rows)` keep to the budget."""
    budget = _CPU_SCORES if device.type == "cpu" else _DEVICE_SCORES
    return max(EQUAL_WIDTH, budget // queries // EQUAL_WIDTH * EQUAL_WIDTH)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """`rows` with rows of zeros up to a multiple of EQUAL_WIDTH."""
    missing = -len(rows) % EQUAL_WIDTH
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def scan(
    queries: Vectors,
    k: int,
    blocks: Sequence[Vectors],
    take_ids: TakeIds,
    *,
    allowed: Mask | None = None,
    metric: str = "ip",
    held: DeviceBlocks | None = None,
) -> Found:
    """Positions and scores `(queries, k)` over consecutive `blocks`, ranked, and the number of entries of each query.

    Args:
        queries: query vectors `(queries, dim)`.
        k: results a query; unused places hold −1 and −inf.
        blocks: float32 vectors; the first row of the first one is position 0.
        take_ids: ids of positions, for the tie rule.
        allowed: mask over all positions; None: every one.
        metric: "ip", or "l2" for negated squared distances.
        held: the blocks on their device; None: on the CPU.
    """
    on_device = held or DeviceBlocks(torch.device("cpu"))
    parts = [
        _scan_queries(queries[start : start + QUERIES], k, blocks, take_ids, allowed, metric, on_device)
        for start in range(0, len(queries), QUERIES)
    ]
    positions, scores, counts = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
    return positions, scores, counts


@torch.inference_mode()
def _scan_queries(
    queries: Vectors,
    k: int,
    blocks: Sequence[Vectors],
    take_ids: TakeIds,
    allowed: Mask | None,
    metric: str,
    held: DeviceBlocks,
) -> Found:
    device = held.device
    left = torch.from_numpy(queries).to(device)
    size = chunk_rows(device, len(queries))
    room = torch.empty(size * len(queries), dtype=torch.float32, device=device)
    own = (left * left).sum(dim=1)[:, None]
    best = TopK(len(queries), k, take_ids)
    for chunk, mask in chunks([len(block) for block in blocks], size, allowed):
        right = held.rows(chunk.number, blocks[chunk.number], chunk.start, chunk.stop)
        if chunk.inside is not None:
            right = right[torch.from_numpy(chunk.inside).to(device)]
        right = padded(right)
        scores = room[: len(queries) * len(right)].view(len(queries), len(right))
        torch.mm(left, right.T, out=scores)
        if metric == "l2":
            # The whole distance before ranking: rounded later, it would make ties that no id has decided.
            scores.mul_(2).sub_((right * right).sum(dim=1)).sub_(own)
        scores[:, chunk.size :] = -torch.inf
        if mask is not None:
            scores[:, : chunk.size][:, torch.from_numpy(~mask).to(device)] = -torch.inf
        rows, columns, values = candidates(scores, best)
        best.add(rows, chunk.positions(columns), values)
    return best.finish()


def candidates(scores: torch.Tensor, best: TopK) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Rows, columns and scores of what may still enter the top k, from a block of scores `(queries, docs)`."""
    thresholds = torch.from_numpy(best.thresholds).to(scores.device)
    if not best.filled and scores.shape[1] > best.k:
        thresholds = torch.maximum(thresholds, _kth_bound(scores, best.k))
    return at_least(scores, thresholds)


def at_least(
    scores: torch.Tensor, thresholds: torch.Tensor
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Rows, columns and values of the scores `(queries, docs)` that reach their row's threshold `(queries,)`."""
    if scores.device.type == "cpu":
        # numpy finds the few hits of a large comparison several times faster than torch does on a CPU.
        block = scores.numpy()
        flat = _hits(block >= thresholds.numpy()[:, None])
        values = block.reshape(-1)[flat]
    else:
        found = (scores >= thresholds[:, None]).view(-1).nonzero().view(-1)
        flat, values = found.cpu().numpy(), scores.view(-1)[found].cpu().numpy()
    rows, columns = np.divmod(flat, scores.shape[1])
    return rows, columns, values


def _kth_bound(scores: torch.Tensor, k: int) -> torch.Tensor:
    """A score that at least `k` of each row reach, `(queries,)`: exact for large k, else a close lower bound.

    The k-th best of the maxima of 16 columns each costs a fraction of the k-th best of all columns.
    """
    groups = scores.view(len(scores), 16, -1).amax(dim=1)
    return (groups if groups.shape[1] >= k else scores).topk(k, dim=1, sorted=False).values.amin(dim=1)


def _hits(mask: Mask) -> NDArray[np.int64]:
    """Flat positions of the few True in a mask whose size is a multiple of 8, looking at 8 at a time."""
    words = np.flatnonzero(mask.reshape(-1).view(np.uint64) != 0)
    inside = np.flatnonzero(mask.reshape(-1, 8)[words])
    return words[inside >> 3] * 8 + (inside & 7)
