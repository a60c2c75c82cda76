"""`shortlist encode`: a collection's documents or queries to a directory of vectors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from shortlist.data import Corpus, load_collection
from shortlist.errors import ConfigError
from shortlist.retrieval.dual_encoder import DEFAULT_MODEL, DualEncoder
from shortlist.retrieval.encode import encode_corpus
from shortlist.retrieval.store import VectorStore

ENGINES = ("local", "ray")


def encode(
    *,
    data: str | Path,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    shard: str | None = None,
    processes: int = 1,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
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
        processes: worker processes of this machine.
        engine: "local", or "ray" for a cluster.
        address: of the Ray cluster; by default a local one is started.
        workers: processes of the cluster with a model each; by default one a GPU, or one for every four CPUs.
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
    on_ray = uses_ray(engine, address=address, workers=workers)
    if on_ray and processes != 1:
        raise ConfigError("--processes is for one machine; with --engine ray say --workers.")
    collection = load_collection(data, on_empty=on_empty, on_error=on_error)
    if side == "documents":
        corpus = collection.corpus
    else:
        queries = collection.all_queries() if split is None else collection.queries(split)
        corpus = Corpus.from_documents(dict(queries))
    options: dict[str, Any] = {
        "side": "document" if side == "documents" else "query", "shard": part, "batch_tokens": batch_tokens,
        "overwrite": overwrite,
    }  # fmt: skip
    if on_ray:
        from shortlist.commands.engine import encode_on_ray

        return encode_on_ray(
            corpus, output, model=model, address=address, workers=workers, device=device, dtype=dtype, **options
        )
    encoder = DualEncoder.from_pretrained(model, device=device, dtype=dtype)
    return encode_corpus(encoder, corpus, output, processes=processes, **options)


def uses_ray(engine: str, **options: Any) -> bool:
    """Whether `engine` is "ray". Raises ConfigError for an unknown one, or for options of Ray without it."""
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r} is unknown; expected {' or '.join(ENGINES)}.")
    given = [name for name, value in options.items() if value is not None]
    if given and engine != "ray":
        raise ConfigError(f"--{given[0]} is for --engine ray; add that, or leave it out.")
    return engine == "ray"


def parse_shard(shard: str | None) -> tuple[int, int] | None:
    """ "1/4" as (1, 4); ConfigError for anything that is not i/n with i from 1 to n."""
    if shard is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"shard is {shard!r}; expected i/n with i from 1 to n, such as 1/4.")
    return int(match[1]), int(match[2])
