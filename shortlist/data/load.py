"""Opening a data set: what kind it is, is told from what the folder or file holds."""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path

from shortlist.data import beir, hf, irds, list_collection, msmarco, xc, xc_collection
from shortlist.data.collection import Collection
from shortlist.data.documents import DEFAULT_TEMPLATE
from shortlist.data.options import ReadOptions
from shortlist.data.registry import DataSetInfo, lookup
from shortlist.errors import ConfigError, DataError, MissingInputError

EMBEDDED = ("scifact",)
_ACCEPTED = (
    "a BEIR folder (corpus.jsonl, queries.jsonl, qrels/*.tsv), a folder of BEIR folders, MS MARCO files "
    "(collection.tsv, queries.*.tsv, qrels.*.tsv), XC files (trn.json.gz and lbl.json.gz, or trn_X.txt, Y.txt and "
    "Y.trn.npz), list files (train.jsonl with query, pos, neg or documents), a Hugging Face data set (save_to_disk or "
    "parquet)"
)


def load_collection(
    path_or_name: str | Path | Collection,
    *,
    on_empty: str = "keep",
    on_error: str = "fail",
    template: str = DEFAULT_TEMPLATE,
    cache_dir: str | Path | None = None,
) -> Collection:
    """Open a data set of any accepted form as a Collection.

    Args:
        path_or_name: a folder or file; `scifact`, the collection that comes with the package, unless a path of this
            name exists; or an ir_datasets id (`irds:beir/scifact/test`, or the id alone if there is no such path).
            A Collection is given back as it is.
        on_empty: documents with neither title nor text (blanks count as nothing): `keep`, `skip` or `error`.
        on_error: lines that cannot be used (broken JSON, bytes that are not UTF-8): `fail`, or `skip` and count.
        template: how title and text are joined into what is encoded and indexed.
        cache_dir: where Arrow files are kept; default $SHORTLIST_CACHE, else ~/.cache/shortlist.

    Raises:
        MissingInputError: nothing of that name.
        DataError: the content is invalid or of no known kind; the sentence names file, line and id where known.
    """
    if isinstance(path_or_name, Collection):
        return path_or_name
    if not isinstance(path_or_name, (str, Path)) or not str(path_or_name):
        raise ConfigError(
            f"a data set is opened by its path or name; found {path_or_name!r}. For data made in Python use "
            "Collection.from_parts(corpus, queries, qrels=…)."
        )
    options = ReadOptions(on_empty, on_error, template, cache_dir)
    text = str(path_or_name)
    if text.startswith("irds:"):
        return _with_registry(irds.read(text.removeprefix("irds:"), options), text)
    path = Path(path_or_name).expanduser()
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        if text in EMBEDDED:
            path = Path(str(importlib.resources.files("shortlist") / "assets" / text))
        elif irds.knows(text):
            return _with_registry(irds.read(text, options), text)
        else:
            raise _missing(text)
    return _with_registry(_read_folder(path, options) if path.is_dir() else _read_file(path, options), path.resolve())


def _read_folder(path: Path, options: ReadOptions) -> Collection:
    if beir.is_beir(path):
        return beir.read_beir(path, options)
    subsets = beir.subset_folders(path)
    if subsets:
        return Collection(
            name=path.resolve().name,
            kind="beir",
            path=path,
            corpus=None,
            queries={},
            qrels={},
            subsets={name: _with_registry(beir.read_beir(folder, options), folder) for name, folder in subsets.items()},
        )
    if msmarco.is_msmarco(path):
        return msmarco.read_msmarco(path, options)
    if hf.is_hf(path):
        return hf.read_hf(path, options)
    if xc.detect(path):
        return xc_collection.read_xc(path, options)
    if list_collection.find_list_files(path):
        return list_collection.read_list_folder(path, options)
    found = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    listed = ", ".join(found[:8]) + (f", … ({len(found)} entries)" if len(found) > 8 else "") or "nothing"
    raise DataError(f"{path} is no data set of a known kind: it holds {listed}; accepted are {_ACCEPTED}.")


def _read_file(path: Path, options: ReadOptions) -> Collection:
    if hf.is_hf_file(path):
        return hf.read_hf(path, options)
    kind = list_collection.kind_of_file(path)
    if kind == "lists":
        return list_collection.read_list_folder(path, options)
    if kind == "corpus":
        return Collection(
            name=path.name.split(".")[0],
            kind="beir",
            path=path,
            corpus=beir.open_corpus_file(path, options),
            queries={},
            qrels={},
            files=[path],
        )
    if msmarco.is_msmarco_file(path):
        return msmarco.read_msmarco(path, options)
    raise DataError(f"{path} is no data set of a known kind: {kind}; accepted are {_ACCEPTED}; or one such file alone.")


def _with_registry(collection: Collection, name: str | Path) -> Collection:
    """Settings that belong to a known data set: which split is reported, self-retrieval, measures."""
    info: DataSetInfo | None = lookup(name)
    # BEIR's form of MS MARCO and every ir_datasets form follow the rules of the data set; other mixtures share a name.
    same = info is not None and (info.kind, collection.kind) in (
        (info.kind, info.kind), (info.kind, "irds"), ("msmarco", "beir")
    )  # fmt: skip
    if info is None or not same:
        return collection
    collection.apply_defaults(
        default_split=info.default_split,
        exclude_self=info.exclude_self,
        measures=info.measures,
        propensity=info.propensity,
    )
    return collection


def _missing(text: str) -> MissingInputError:
    hint = f" The names that come with the package: {', '.join(EMBEDDED)}."
    if lookup(text) is not None and not re.search(r"[/\\]", text):
        hint = f" It is a known data set: `shortlist data download {text}` fetches it where there is a network."
    elif irds.looks_like_id(text):
        hint += " For an ir_datasets id, install the extra: pip install 'shortlist[irds]'." * (not irds.is_installed())
    return MissingInputError(f"{text} does not exist and is no name of a data set here; check the path.{hint}")
