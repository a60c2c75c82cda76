"""`shortlist encode`: a collection's documents or queries to a directory of vectors."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shortlist.data import Corpus, load_collection
from shortlist.errors import ConfigError
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DualEncoder
from shortlist.retrieval.encode import encode_corpus
from shortlist.retrieval.store import VectorStore


def encode(
    *,
    data: str | Path,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    shard: str | None = None,
    processes: int = 1,
    side: str = "documents",
    split: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int | None = None,
    on_empty: str = "keep",
    on_error: str = "fail",
    overwrite: bool = False,
) -> VectorStore:
    """Encode one side of a collection; the same call again goes on where an interrupted one stopped.

    Args:
        data: path or name of a collection.
        output: directory to write.
        model: path or name of a dual encoder.
        shard: "i/n" writes only the i-th of n parts.
        processes: worker processes.
        side: "documents" or "queries".
        split: whose queries; by default all of them.
        device: of the model.
        dtype: of the computation.
        batch_tokens: tokens of one forward pass.
        on_empty: documents without text: keep, skip or error.
        on_error: broken lines: fail or skip.
        overwrite: delete what is at `output` and start anew.
    """
    if side not in ("documents", "queries"):
        raise ConfigError(f"side is {side!r}; expected 'documents' or 'queries'.")
    part = parse_shard(shard)
    collection = load_collection(data, on_empty=on_empty, on_error=on_error)
    encoder = DualEncoder.from_pretrained(model, device=device, dtype=dtype)
    if side == "documents":
        corpus = collection.corpus
    else:
        queries = collection.all_queries() if split is None else collection.queries(split)
        corpus = Corpus.from_documents(dict(queries))
    return encode_corpus(
        encoder, corpus, output, side="document" if side == "documents" else "query", shard=part,
        processes=processes, batch_tokens=batch_tokens, overwrite=overwrite,
    )  # fmt: skip


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """ "1/4" as (1, 4); ConfigError for anything that is not i/n with i from 1 to n."""
    if shard is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"shard is {shard!r}; expected i/n with i from 1 to n, such as 1/4.")
    return int(match[1]), int(match[2])
