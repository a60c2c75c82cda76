"""Building an index anew as another kind, from the vectors it holds, in its own directory."""

from __future__ import annotations

from shortlist.errors import ConfigError, DataError
from shortlist.indexes import lifecycle
from shortlist.indexes.base import VectorIndex
from shortlist.indexes.kinds import new_index, open_index


def rebuild(index: VectorIndex, spec: str) -> VectorIndex:
    """Replace the directory of `index` by an index of `spec` with the same ids, vectors, documents and model; opened.

    What was removed is left out, and what was not committed comes in. The vectors stream from the old files; until
    the new generation is complete, and for who has it open, the old one stays readable.

    Raises:
        ConfigError: an unknown spec, or the index was not opened from a directory.
        DataError: the index holds compressed codes only.
        ShortlistError: another process is writing, or has committed since this index was opened.
    """
    home = index._home
    if home is None:
        raise ConfigError(
            "this index has no directory to rebuild; save(path) writes it, and open_index(path) opens it."
        )
    if not (index.lossless or index._keeps_vectors):
        raise DataError(
            f"{home.path} ({index.spec}) holds compressed codes without the vectors they were made from; build it from "
            "the vectors with `shortlist index`, best with +rescore, which keeps them."
        )
    fresh = new_index(spec, index.dim, metric=index.metric, device="cpu", count=len(index))
    fresh.model, fresh.frequency_prior = index.model, index.frequency_prior
    with lifecycle.writing(index):
        change = home.change
        if change is None:
            raise ConfigError("the index is not being written.")
        written = lifecycle._write(index, change, 0, len(index._ids), present_only=True)
        segment = lifecycle.make_base(fresh, change.path / written["name"], written["count"])
        change.publish({**fresh.manifest, "count": written["count"]}, segments=[segment])
    return open_index(home.path, device="cpu")
