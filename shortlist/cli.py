"""The command line: parses arguments and calls `shortlist.commands`; nothing heavy is imported for --help."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shortlist._version import __version__
from shortlist.errors import ConfigError, ShortlistError

STATIC_MODEL = "shortlist/static-en"
UNHARMED = "nothing was half-written, fix this and run the command again."

app = typer.Typer(
    name="shortlist",
    help="Neural retrieval and ranking: train, index, search, evaluate.",
    epilog="Tables and JSON go to stdout, everything else to stderr. Exit codes: 0 ok, 2 usage, 3 missing "
    "package, 4 missing input, 5 invalid data, 1 anything else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Look at, convert and download collections.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Data = Annotated[str, typer.Option("--data", help="Collection: a folder, a file, or a name such as scifact.")]
OptionalData = Annotated[str | None, typer.Option("--data", help="Collection: a folder, a file, or a name.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite/--no-overwrite", help="Replace an output that exists.")]
Split = Annotated[str | None, typer.Option("--split", help="Split with the queries (default: the collection's).")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
BatchTokens = Annotated[
    int | None, typer.Option("--batch-tokens", help="Tokens in one forward pass, padding included.")
]
OnEmpty = Annotated[str, typer.Option("--on-empty", help="Documents without text: keep, skip or error.")]
OnError = Annotated[str, typer.Option("--on-error", help="Lines that cannot be read: fail or skip.")]
ExcludeSelf = Annotated[
    str,
    typer.Option("--exclude-self", help="Drop the query's own id: auto (the data set's rule), true, false."),
]
Recall = Annotated[
    float | None, typer.Option("--recall", help="Share of the true 10 best that searches must find (default 0.95).")
]
Memory = Annotated[str | None, typer.Option("--memory", help="What searches may keep busy: 4GB, 512MiB.")]
Latency = Annotated[str | None, typer.Option("--latency", help="Median of single queries on one core: 5ms, 0.01s.")]
Engine = Annotated[str, typer.Option("--engine", help="local, or ray: on a cluster.")]
Address = Annotated[
    str | None, typer.Option("--address", help="ray: HOST:PORT or auto [default: a cluster of this machine].")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"shortlist {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars, warnings only.")] = False,
) -> None:
    if quiet:
        os.environ["SHORTLIST_QUIET"] = "1"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s" if quiet else "%(message)s"))
    logger = logging.getLogger("shortlist")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="A YAML file, or a packaged name (an unknown one lists them).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings by dotted key: training.seed=1.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Directory of the trained model.")] = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Continue an interrupted run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print steps, memory and what is missing; train nothing.")
    ] = False,
) -> None:
    """Train a model from a configuration."""
    from shortlist.commands.train import train as run

    run(config, overrides=list(overrides or []), output=output, overwrite=overwrite, resume=resume, dry_run=dry_run)


@app.command()
def encode(
    data: Data,
    output: Output,
    model: Annotated[str, typer.Option("--model", help="Folder or name of a dual encoder.")] = STATIC_MODEL,
    shard: Annotated[str | None, typer.Option("--shard", help="Only part i of n, as i/n: 1/4.")] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Worker processes.")] = 1,
    engine: Engine = "local",
    address: Address = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="ray: processes with a model each.")] = None,
    side: Annotated[str, typer.Option("--side", help="documents or queries.")] = "documents",
    split: Split = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_tokens: BatchTokens = None,
    on_empty: OnEmpty = "keep",
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Turn texts into vectors on disk. Started again after an interruption, it goes on where it stopped."""
    from shortlist.commands.encode import encode as run

    run(
        model=model, data=data, output=output, shard=shard, processes=processes, engine=engine, address=address,
        workers=workers, side=side, split=split, device=device, dtype=dtype, batch_tokens=batch_tokens,
        on_empty=on_empty, on_error=on_error, overwrite=overwrite,
    )  # fmt: skip


@app.command()
def index(
    data: Data,
    output: Output,
    model: Annotated[str, typer.Option("--model", help="Folder or name of a dual encoder.")] = STATIC_MODEL,
    vectors: Annotated[Path | None, typer.Option("--vectors", help="Output of `encode`, instead of encoding.")] = None,
    index: Annotated[
        str, typer.Option("--index", help="What to build: auto, exact, hnsw, ivf-pq …, bm25, or a FAISS factory.")
    ] = "exact",
    recall: Recall = None,
    memory: Memory = None,
    latency: Latency = None,
    tune_split: Annotated[str | None, typer.Option("--tune-split", help="Tune with the queries of this split.")] = None,
    tune_queries: Annotated[
        Path | None, typer.Option("--tune-queries", help="Tune with the queries of this file.")
    ] = None,
    language: Annotated[
        str | None, typer.Option("--language", help="bm25: stemmer and stop words: german, … or none [english].")
    ] = None,
    stemmer: Annotated[str | None, typer.Option("--stemmer", help="bm25: another stemmer, or none.")] = None,
    stopwords: Annotated[
        str | None, typer.Option("--stopwords", help="bm25: another language's, a file of words, or none.")
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents/--no-documents", help="Store titles and texts, for snippets.")
    ] = True,
    frequency_prior: Annotated[
        str | None, typer.Option("--frequency-prior", help="Store how frequent labels are in this split, for search.")
    ] = None,
    engine: Engine = "local",
    address: Address = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="ray: parts that are built at once.")] = None,
    shards: Annotated[int | None, typer.Option("--shards", min=1, help="ray: parts [default: one a node].")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_tokens: BatchTokens = None,
    on_empty: OnEmpty = "keep",
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Encode a corpus and build an index that `search` opens."""
    if index == "bm25":
        from shortlist.commands.index_bm25 import index_bm25, refuse_others

        refuse_others(
            vectors=vectors, frequency_prior=frequency_prior, recall=recall, memory=memory, latency=latency,
            tune_split=tune_split, tune_queries=tune_queries, batch_tokens=batch_tokens,
            engine=None if engine == "local" else engine, address=address, workers=workers, shards=shards,
        )  # fmt: skip
        index_bm25(
            data=data, output=output, language=language, stemmer=stemmer, stopwords=stopwords,
            store_documents=documents, on_empty=on_empty, on_error=on_error, overwrite=overwrite,
        )  # fmt: skip
        return
    if (language, stemmer, stopwords) != (None, None, None):
        raise ConfigError("--language, --stemmer and --stopwords are for --index bm25; a model reads text in its way.")
    from shortlist.commands.index import index as run

    run(
        engine=engine, address=address, workers=workers, shards=shards,
        model=model, data=data, output=output, vectors=vectors, index=index, recall=recall, memory=memory,
        latency=latency, tune_split=tune_split, tune_queries=tune_queries, store_documents=documents,
        frequency_prior=frequency_prior, device=device, dtype=dtype, batch_tokens=batch_tokens, on_empty=on_empty,
        on_error=on_error, overwrite=overwrite,
    )  # fmt: skip


@app.command()
def tune(
    index: Annotated[Path, typer.Argument(help="Directory made by `index`.")],
    recall: Recall = None,
    memory: Memory = None,
    latency: Latency = None,
    data: OptionalData = None,
    split: Split = None,
    queries: Annotated[Path | None, typer.Option("--queries", help="File of queries (JSON lines or tsv).")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Let the kind of index change too.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="Dual encoder (default: the index's own).")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Find the fastest search settings of an index that reach a recall, and measure them."""
    from shortlist.commands.tune import tune as run

    run(
        index=index, recall=recall, memory=memory, latency=latency, data=data, split=split, queries=queries,
        rebuild=rebuild, model=model, device=device, dtype=dtype, as_json=as_json,
    )  # fmt: skip


@app.command()
def update(
    index: Annotated[Path, typer.Argument(help="Directory made by `index`.")],
    data: Annotated[str | None, typer.Option("--data", help="Add the documents of this collection.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Documents that are there get new vectors.")] = False,
    remove: Annotated[Path | None, typer.Option("--remove", help="Remove the ids in this file, one a line.")] = None,
    merge: Annotated[list[Path] | None, typer.Option("--merge", help="Add all of another index (repeatable).")] = None,
    compact: Annotated[bool, typer.Option("--compact", help="Rewrite without what was removed.")] = False,
    model: Annotated[str | None, typer.Option("--model", help="Dual encoder (default: the index's own).")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    on_empty: OnEmpty = "keep",
    on_error: OnError = "fail",
) -> None:
    """Add, remove or merge documents of an index. One durable step: all of it, or nothing."""
    from shortlist.commands.update import update as run

    run(
        index=index, data=data, replace=replace, remove=remove, merge=list(merge or []), compact=compact, model=model,
        device=device, dtype=dtype, on_empty=on_empty, on_error=on_error,
    )  # fmt: skip


@app.command()
def export(
    index: Annotated[Path, typer.Argument(help="Directory made by `index`.")],
    to: Annotated[
        str, typer.Option("--to", help="npy, jsonl, parquet, qdrant, milvus, lancedb, opensearch or pgvector.")
    ],
    output: Output,
    documents: Annotated[
        bool, typer.Option("--documents/--no-documents", help="Write titles, texts and fields too.")
    ] = True,
    name: Annotated[str, typer.Option("--name", help="Collection or table that LOAD.md makes.")] = "documents",
    gzip: Annotated[bool, typer.Option("--gzip/--no-gzip", help="Compress, for jsonl.")] = False,
    reconstruct: Annotated[
        bool, typer.Option("--reconstruct/--no-reconstruct", help="Accept approximate vectors of a compressed index.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write an index for another engine. The output holds the files that its loader takes, and LOAD.md says how."""
    from shortlist.commands.export import export as run

    run(
        index=index, to=to, output=output, store_documents=documents, name=name, gzip=gzip, reconstruct=reconstruct,
        overwrite=overwrite,
    )  # fmt: skip


@app.command()
def search(
    index: Annotated[
        list[Path] | None, typer.Option("--index", help="Directory made by `index`; several are fused.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Dual encoder (default: the index's own).")] = None,
    data: OptionalData = None,
    bm25: Annotated[bool, typer.Option("--bm25", help="Search --data with BM25; no index needed.")] = False,
    split: Split = None,
    query: Annotated[str | None, typer.Option("--query", help="One query; prints a table.")] = None,
    queries: Annotated[Path | None, typer.Option("--queries", help="A file of queries (JSON lines or tsv).")] = None,
    top_k: Annotated[int, typer.Option("--top-k", "-k", help="Results a query.")] = 100,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Run file to write (.run or .run.gz).")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Name of the run (default: from the output).")] = None,
    format: Annotated[str, typer.Option("--format", help="trec or msmarco (three columns).")] = "trec",
    filter: Annotated[
        str | None, typer.Option("--filter", help='Only documents whose fields match: "year >= 2010 and not draft".')
    ] = None,
    exclude_self: ExcludeSelf = "auto",
    fuse: Annotated[
        str | None, typer.Option("--fuse", help="rrf, min-max or z-score [rrf; with weights min-max].")
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="For fusing, one an index: 0.3,0.7.")] = None,
    tune_weights: Annotated[
        str | None, typer.Option("--tune-weights", help="Choose the weights on this split, such as dev.")
    ] = None,
    depth: Annotated[int | None, typer.Option("--depth", help="Documents of each index that are fused [1000].")] = None,
    roll_up: Annotated[
        str | None, typer.Option("--roll-up", help="Passages to documents: max, first, mean or mean(m).")
    ] = None,
    parent: Annotated[
        str | None, typer.Option("--parent", help="For --roll-up: separator in passage ids ('#'), or a field.")
    ] = None,
    frequency_bias: Annotated[
        float | None, typer.Option("--frequency-bias", help="Weight of the log label frequency: -0.5 helps rare ones.")
    ] = None,
    frequency_prior: Annotated[
        str | None, typer.Option("--frequency-prior", help="Split counted for it, without an index (default: train).")
    ] = None,
    engine: Engine = "local",
    address: Address = None,
    shards: Annotated[int | None, typer.Option("--shards", min=1, help="ray: ranges of an exact index.")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=1, help="ray: processes of each part [1].")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a run, or answer one query. Searches an index, several fused, or a collection directly."""
    from shortlist.commands.search import search as run

    options: dict[str, Any] = dict(
        index=list(index or []), model=model, data=data, bm25=bm25, split=split, query=query, queries=queries,
        top_k=top_k, output=output, tag=tag, format=format, filter=filter, exclude_self=exclude_self, fuse=fuse,
        weights=weights, tune_weights=tune_weights, depth=depth, roll_up=roll_up, parent=parent,
        frequency_bias=frequency_bias, frequency_prior=frequency_prior, device=device, dtype=dtype, as_json=as_json,
        overwrite=overwrite,
    )  # fmt: skip
    if engine == "local" and (address, shards, replicas) == (None, None, None):
        run(**options)
        return
    from shortlist.commands.engine import search_on_ray

    search_on_ray(engine, address=address, shards=shards, replicas=replicas, **options)


@app.command()
def mine(
    data: Data,
    output: Output,
    model: Annotated[
        str | None, typer.Option("--model", help=f"Folder or name of a dual encoder [default: {STATIC_MODEL}].")
    ] = None,
    bm25: Annotated[bool, typer.Option("--bm25", help="Search with BM25 instead of a model.")] = False,
    split: Annotated[str, typer.Option("--split", help="Split whose judged queries are mined for.")] = "train",
    top_k: Annotated[int, typer.Option("--top-k", "-k", help="Negatives a query.")] = 50,
    depth: Annotated[
        int | None, typer.Option("--depth", help="Candidates asked for a query [default: 2 k + skip + 100].")
    ] = None,
    skip: Annotated[int, typer.Option("--skip", help="Best candidates passed over.")] = 0,
    min_score: Annotated[float | None, typer.Option("--min-score", help="Lowest score of a negative.")] = None,
    max_score: Annotated[float | None, typer.Option("--max-score", help="Highest score of a negative.")] = None,
    relative_margin: Annotated[
        float | None, typer.Option("--relative-margin", help="Drop above (1 - this) x the positives' mean score.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option("--margin", help="Drop above the positives' mean score minus this.")
    ] = None,
    index: Annotated[
        str, typer.Option("--index", help="exact, hnsw, ivf-flat …, or a FAISS factory string.")
    ] = "exact",
    device: Device = "auto",
    dtype: Dtype = "auto",
    on_empty: OnEmpty = "keep",
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Write hard negatives for training. Known positives go, by id and by text; scores filter the rest."""
    from shortlist.commands.mine import mine as run

    run(
        data=data, output=output, model=model, bm25=bm25, split=split, k=top_k, depth=depth, skip=skip,
        min_score=min_score, max_score=max_score, relative_margin=relative_margin, margin=margin, index=index,
        device=device, dtype=dtype, on_empty=on_empty, on_error=on_error, overwrite=overwrite,
    )  # fmt: skip


@app.command()
def evaluate(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[QRELS] RUN... [MEASURE]...", help="Files and measures, in any order.")
    ],
    data: OptionalData = None,
    split: Split = None,
    as_json: AsJson = False,
    per_query: Annotated[Path | None, typer.Option("--per-query", help="Write each query's values here.")] = None,
    exclude_self: ExcludeSelf = "auto",
    by_frequency: Annotated[
        bool, typer.Option("--by-frequency", help="Also by training frequency: deciles, head, torso, tail, zero-shot.")
    ] = False,
    propensity: Annotated[
        str | None, typer.Option("--propensity", help="For PSP@k: other, amazon, wikipedia or A,B (default: by name).")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure runs: one table, a column a run. Without --data the first file holds the qrels."""
    from shortlist.commands.evaluate import evaluate_files as run

    run(
        arguments, data=data, split=split, as_json=as_json, per_query=per_query, exclude_self=exclude_self,
        by_frequency=by_frequency, propensity=propensity, overwrite=overwrite,
    )  # fmt: skip


@app.command()
def demo(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep model, index and runs here (default: nothing is kept).")
    ] = None,
    data: Data = "scifact",
    model: Annotated[str, typer.Option("--model", help="Encoder to start from.")] = STATIC_MODEL,
    config: Annotated[str, typer.Option("--config", help="Training configuration.")] = "scifact-dual-encoder",
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """All steps on the embedded collection. Trains, indexes, searches, evaluates; prints what each gave and took."""
    from shortlist.commands.demo import demo as run

    run(output=output, data=data, model=model, config=config, as_json=as_json, overwrite=overwrite)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Name what needs attention on this machine. Prints versions, devices, OpenMP runtimes, FAISS usability, memory."""
    from shortlist.commands.doctor import doctor as run

    run(as_json=as_json)


@data_app.command("info")
def data_info(
    path: Annotated[str, typer.Argument(help="Collection: a folder, a file, or a name.")],
    as_json: AsJson = False,
    on_error: OnError = "fail",
) -> None:
    """Describe a collection. Counts, fill rates, lengths, duplicates, and judgements that point nowhere."""
    from shortlist.commands.data import info as run

    run(path, as_json=as_json, on_error=on_error)


@data_app.command("convert")
def data_convert(
    path: Annotated[str, typer.Argument(help="Collection in any readable format.")],
    output: Annotated[Path, typer.Argument(help="Where to write.")],
    to: Annotated[str, typer.Option("--to", help="beir, qrels, lists or npz.")] = "beir",
    split: Split = None,
    on_empty: OnEmpty = "keep",
    on_error: OnError = "fail",
    overwrite: Overwrite = False,
) -> None:
    """Write a collection in another format."""
    from shortlist.commands.data import convert as run

    run(path, output, to=to, split=split, on_empty=on_empty, on_error=on_error, overwrite=overwrite)


@data_app.command("download")
def data_download(
    name: Annotated[str, typer.Argument(help="Name of a registered data set.")],
    root: Annotated[Path, typer.Option("--root", help="Folder for data sets.")] = Path("data"),
    url: Annotated[str | None, typer.Option("--url", help="Another mirror of the same file.")] = None,
) -> None:
    """Fetch a registered data set. Resumes, and checks the checksum where one is known."""
    from shortlist.commands.data import download as run

    run(name, root=root, url=url)


def main(arguments: list[str] | None = None) -> Any:
    """Console entry point: runs the command line and turns known errors into one sentence and an exit code."""
    try:
        return app(arguments)
    except ShortlistError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of stdout is gone (`| head`); there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; {UNHARMED}", 1)
    except Exception as error:
        # Libraries that write files themselves (safetensors, faiss, Arrow) report a full disk in types of their own.
        if "No space left on device" not in str(error):
            raise
        _fail(f"No space left on device; {UNHARMED}", 1)


def _fail(message: str, code: int) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
