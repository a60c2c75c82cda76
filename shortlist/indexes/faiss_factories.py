"""What is inside a faiss index: which search parameters it takes, what it needs to train, what it can give back.

No module is imported here: functions take the faiss module from `indexes/faiss.py`, which loads it on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shortlist.indexes.specs import PER_CLUSTER

_CLUSTERS = re.compile(r"(?<![A-Za-z0-9])IVF(\d+)")
_CODEBOOK = re.compile(r"(?:PQ|PRQ|PLSQ|RQ|LSQ)\d+(?:x(\d+))?")
_ROTATION = re.compile(r"OPQ\d+")
# Pattern, lowest and highest number, and what it counts.
_RANGES = (
    (re.compile(r"HNSW(\d+)"), 2, 512, "links of a vector in a graph"),
    (re.compile(r"NSG(\d+)"), 2, 512, "links of a vector in a graph"),
    (re.compile(r"IVF(\d+)"), 1, 1 << 24, "clusters"),
)
_LEAST = 20_000  # vectors that training is given where there are as many
# Learning a rotation takes faiss minutes with its 50 rounds over 65,536 vectors; the error hardly falls after these.
_ROTATIONS, _ROTATED = 10, 16_384
_SAMPLE = 64  # vectors a cluster that training is given


def out_of_range(factory: str) -> str | None:
    """What of `factory` no index can have, with what it can; None if its numbers are within reach."""
    for pattern, lowest, highest, what in _RANGES:
        for match in pattern.finditer(factory):
            if not lowest <= int(match.group(1)) <= highest:
                return f"{match.group(1)} {what}; expected {lowest} to {highest:,}"
    return None


def cluster_count(factory: str) -> int:
    """Number of clusters that a factory string asks for; 0 if it has none."""
    match = _CLUSTERS.search(factory)
    return int(match.group(1)) if match else 0


def with_clusters(factory: str, count: int) -> str:
    """`factory` with `count` clusters."""
    return _CLUSTERS.sub(f"IVF{count}", factory, count=1)


def codebook(factory: str) -> int:
    """Fewest training vectors that the quantisers of `factory` accept: one for each entry of a codebook."""
    sizes = [1 << int(match.group(1) or 8) for match in _CODEBOOK.finditer(_ROTATION.sub("", factory))]
    return max([*sizes, 1]) if sizes or not _ROTATION.search(factory) else 256


def training_minimum(factory: str) -> int:
    """Fewest vectors on which `factory` trains well."""
    return max(PER_CLUSTER * cluster_count(factory), codebook(factory))


def training_sample(factory: str) -> int:
    """Number of vectors that training `factory` is given where there are as many."""
    return max(_SAMPLE * cluster_count(factory), _LEAST, training_minimum(factory))


def layers(faiss: Any, index: Any) -> Iterator[Any]:
    """`index` and what it wraps, from the outside in, each under its own class."""
    while index is not None:
        index = faiss.downcast_index(index)
        yield index
        # IndexPreTransform and IndexIDMap hold the next index as `index`, IndexRefine as `base_index`.
        index = getattr(index, "base_index", None) or getattr(index, "index", None)


def transforms(faiss: Any, layer: Any) -> list[Any]:
    """What a layer does to vectors before it hands them on, such as a rotation."""
    chain: Any = getattr(layer, "chain", None)
    return [] if chain is None else [faiss.downcast_VectorTransform(chain.at(n)) for n in range(chain.size())]


def ivf_layer(faiss: Any, index: Any) -> Any:
    """The layer with inverted lists, None if there is none."""
    return next((layer for layer in layers(faiss, index) if isinstance(layer, faiss.IndexIVF)), None)


def selects(faiss: Any, index: Any) -> bool:
    """Whether a search can be told which positions to look at; a PQ or fast-scan index without clusters cannot."""
    core = list(layers(faiss, index))[-1]
    names = ("IndexIVF", "IndexHNSW", "IndexFlat", "IndexScalarQuantizer", "IndexRaBitQ")
    return isinstance(core, tuple(getattr(faiss, name) for name in names if hasattr(faiss, name)))


def lossless(faiss: Any, index: Any) -> bool:
    """Whether the vectors that were added can be read back."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return lossless(faiss, index.refine_index)
    names = ("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexIVFFlat", "IndexHNSWFlat")
    return type(index).__name__ in names


def exhaustive(faiss: Any, index: Any) -> bool:
    """Whether every vector is compared without loss, so that results are exact."""
    return type(faiss.downcast_index(index)).__name__ in ("IndexFlat", "IndexFlatIP", "IndexFlatL2")


def train(faiss: Any, index: Any, sample: Any, factory: str) -> None:
    """Train a new index of `factory` in reasonable time and without remarks on stderr. Raises what faiss raises."""
    rotations = []
    for layer in layers(faiss, index):
        for transform in transforms(faiss, layer):
            if isinstance(transform, faiss.OPQMatrix):
                transform.niter = min(transform.niter, _ROTATIONS)
                transform.max_train_points = min(transform.max_train_points, _ROTATED)
                # The rotation is learnt for codebooks of the size that follows it; faiss would take 256 entries.
                quantiser = faiss.ProductQuantizer(transform.d_out, transform.M, codebook(factory).bit_length() - 1)
                quantiser.cp.min_points_per_centroid = 1
                transform.pq = quantiser
                rotations.append((transform, quantiser))
        for part in [layer, *([faiss.downcast_index(layer.storage)] if hasattr(layer, "storage") else [])]:
            if hasattr(part, "do_polysemous_training"):
                # Minutes of reordering the codebooks for a kind of search that is never asked for here.
                part.do_polysemous_training = False
            if hasattr(part, "pq"):
                part.pq.cp.min_points_per_centroid = 1
        if isinstance(layer, faiss.IndexIVF):
            layer.cp.min_points_per_centroid = 1
    try:
        index.train(sample)
    finally:
        for transform, _ in rotations:
            transform.pq = None


def parameters(faiss: Any, index: Any, *, nprobe: int, ef_search: int, selector: Any = None) -> Any:
    """faiss's search parameters for one call, which leave the shared index as it is; None where it takes none."""
    index = faiss.downcast_index(index)
    chosen: dict[str, Any] = {} if selector is None else {"sel": selector}
    if isinstance(index, faiss.IndexPreTransform):
        inner = parameters(faiss, index.index, nprobe=nprobe, ef_search=ef_search, selector=selector)
        return None if inner is None else faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexRefine):
        inner = parameters(faiss, index.base_index, nprobe=nprobe, ef_search=ef_search, selector=selector)
        return None if inner is None else faiss.IndexRefineSearchParameters(
            base_index_params=inner, k_factor=index.k_factor
        )  # fmt: skip
    if isinstance(index, faiss.IndexIDMap):
        return parameters(faiss, index.index, nprobe=nprobe, ef_search=ef_search, selector=selector)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=min(nprobe, index.nlist), **chosen)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=ef_search, **chosen)
    return faiss.SearchParameters(**chosen) if chosen else None
