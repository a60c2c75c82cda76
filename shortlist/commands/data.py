"""`shortlist data info | convert | download`: look at, rewrite and fetch collections."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def info(path: str | os.PathLike[str], *, as_json: bool = False, on_error: str = "fail") -> dict[str, Any]:
    """Describe a collection on stdout, as tables or JSON; returns the dictionary (`data.info.collection_info`)."""
    from shortlist.data import load_collection
    from shortlist.data.info import collection_info

    found = collection_info(load_collection(path if isinstance(path, str) else Path(path), on_error=on_error))
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        print_info(found)
    return found


def convert(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str = "beir",
    split: str | None = None,
    on_empty: str = "keep",
    on_error: str = "fail",
    overwrite: bool = False,
) -> Path:
    """Write the collection at `path` in another format (`data.convert.convert`) and print where it is."""
    from shortlist.data import load_collection
    from shortlist.data.convert import convert as write
    from shortlist.files import refuse_existing

    refuse_existing(output, overwrite=overwrite)
    collection = load_collection(path if isinstance(path, str) else Path(path), on_empty=on_empty, on_error=on_error)
    written = write(collection, output, to=to, split=split, overwrite=overwrite)
    sys.stdout.write(f"{written}\n")
    return written


def download(
    name: str, *, root: str | os.PathLike[str] = "data", url: str | None = None, md5: str | None = None
) -> Path:
    """Fetch a registered data set (`data.download.download`) and print its folder."""
    from shortlist.data.download import download as fetch

    folder = fetch(name, root=root, url=url, md5=md5)
    sys.stdout.write(f"{folder}\n")
    return folder


def print_info(found: dict[str, Any]) -> None:
    """Print the dictionary of `collection_info` as tables on stdout."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 10_000  # a pipe has no width: wrap nothing
    if "subsets" in found:
        table = _table("collection", "documents", "queries", "splits")
        for name, subset in found["subsets"].items():
            counts = ", ".join(f"{split} {one['queries']:,}" for split, one in subset["splits"].items())
            table.add_row(name, f"{subset['documents']['count']:,}", f"{subset['queries']['count']:,}", counts)
        console.print(f"{found['name']}: {len(found['subsets'])} collections, each searched on its own")
        console.print(table)
        console.print("For the details of one, name its folder.")
        return
    _print_head(console, found)
    _print_texts(console, found)
    if found["splits"]:
        _print_splits(console, found)
    if "labels" in found:
        _print_labels(console, found)
    for split, lists in found.get("lists", {}).items():
        per = lists["documents"] or {"mean": 0, "max": 0}
        console.print(f"lists {split}: {lists['lists']:,}, {per['mean']:g} documents each (at most {per['max']:,})")
    for finding in findings(found):
        console.print(f"! {finding}", soft_wrap=True)


def findings(found: dict[str, Any]) -> list[str]:
    """What deserves a look, as sentences with counts and examples; empty for a clean collection."""
    sentences = list(found["notes"])
    for noun in ("documents", "queries"):
        part = found[noun]
        if part["empty"] and noun == "queries":  # the notes count the empty documents
            sentences.append(f"{part['empty']:,} {noun} are empty.")
        copies = part["duplicates"]
        if copies["copies"]:
            shown = "; ".join(" = ".join(group) for group in copies["examples"])
            sentences.append(
                f"{copies['copies']:,} {noun} repeat the text of another, in {copies['groups']:,} groups: {shown}."
            )
    for split, one in found["splits"].items():
        for key, sentence in (
            ("absent_documents", "judged documents are not in the corpus"),
            ("absent_queries", "judged queries are not in the queries file"),
            ("empty_queries", "judged queries are empty"),
            ("without_relevant", "judged queries have no relevant document"),
        ):
            sentences += _counted(one[key], f"{split}: {{}} {sentence}")
    for pair in found["shared_queries"]:
        first, second = pair["splits"]
        sentences += _counted(pair["by_id"], f"{{}} queries are in both {first} and {second}")
        sentences += _counted(pair["by_text"], f"{{}} queries of {second} have a text that is also in {first}")
    sentences += _counted(found["queries"]["judged_in_no_split"], "{} queries are judged in no split")
    if "labels" in found and "without_training_points" in found["labels"]:
        sentences += _counted(found["labels"]["without_training_points"], "{} labels have no training point")
    registered = found.get("registry")
    if registered and registered["documents"] and registered["documents"] != found["documents"]["count"]:
        sentences.append(
            f"{registered['name']} is published with {registered['documents']:,} documents; here are "
            f"{found['documents']['count']:,}."
        )
    return sentences


def _print_head(console: Console, found: dict[str, Any]) -> None:
    where = f" in {found['path']}" if found["path"] else ""
    console.print(f"{found['name']} ({found['kind']}){where}", soft_wrap=True)
    registered = found["registry"]
    if registered:
        version = f", version {registered['version']}" if registered["version"] else ""
        console.print(f"registered as {registered['name']}{version}. {registered['notes']}".rstrip(), soft_wrap=True)
    rule = "; a query's own id is removed from its results" if found["exclude_self"] else ""
    console.print(f"default split: {found['default_split'] or 'none (no judgements)'}{rule}")


def _print_texts(console: Console, found: dict[str, Any]) -> None:
    spread = ("min", "p50", "p90", "p95", "p99", "max", "mean")
    table = _table("", "count", "empty", "title", "text", "metadata", "length in", *spread)
    for noun in ("documents", "queries"):
        part = found[noun]
        filled = [f"{part['filled'][name]['rate']:.1%}" if "filled" in part else "" for name in _FILLED]
        for row, unit in enumerate(("words", "characters")):
            lengths = part[unit] or dict.fromkeys(spread, 0)
            head = [noun, f"{part['count']:,}", f"{part['empty']:,}", *filled] if row == 0 else [""] * 6
            table.add_row(*head, unit, *(f"{lengths[name]:,}" for name in spread))
    console.print(table)
    fields = found["documents"]["metadata_fields"]
    if fields:
        console.print("metadata: " + ", ".join(f"{name} {one['rate']:.1%}" for name, one in fields.items()))


def _print_splits(console: Console, found: dict[str, Any]) -> None:
    table = _table("split", "queries", "judgements", "relevant a query", "at most", "grades")
    for split, one in found["splits"].items():
        relevant = one["relevant_per_query"] or {"mean": 0, "max": 0}
        grades = ", ".join(f"{grade}: {count:,}" for grade, count in one["grades"].items())
        table.add_row(
            split,
            f"{one['queries']:,}",
            f"{one['judgements']:,}",
            f"{relevant['mean']:g}",
            f"{relevant['max']:,}",
            grades,
        )
    console.print(table)


def _print_labels(console: Console, found: dict[str, Any]) -> None:
    labels = found["labels"]
    spread = ("min", "p50", "p90", "p95", "p99", "max", "mean")
    table = _table("", "count", *spread)
    rows = {f"labels a {split} point": values for split, values in labels["labels_per_point"].items()}
    counts = {
        name: found["splits"][split]["queries"] for name, split in zip(rows, labels["labels_per_point"], strict=True)
    }
    if "points_per_label" in labels:
        rows["train points a label"], counts["train points a label"] = labels["points_per_label"], labels["count"]
    for name, values in rows.items():
        if values is not None:
            table.add_row(name, f"{counts[name]:,}", *(f"{values[one]:,}" for one in spread))
    console.print(table)
    console.print(f"labels without text: {labels['without_text']['count']:,}")
    if labels["propensity"]:
        constants = "A = {:g}, B = {:g}".format(*labels["propensity"])
        console.print(f"propensity {constants} (family {labels['propensity_family']})")
    pairs = ", ".join(f"{split} {count:,}" for split, count in labels["filtered_pairs"].items() if count)
    console.print(f"pairs never to be predicted: {pairs or 'none'}")
    if "groups" not in labels:
        return
    table = _table("labels by training frequency", "labels", "training points", "of train", "of test")
    for name, group in labels["groups"].items():
        low, high = group["training_points"]
        shares = (
            "" if share is None else f"{share:.1%}" for share in (group["share_of_train"], group["share_of_test"])
        )
        table.add_row(name, f"{group['labels']:,}", f"{low:,} to {high:,}", *shares)
    unseen = labels["without_training_points"]
    share = unseen["share_of_test"]
    table.add_row("zero-shot", f"{unseen['count']:,}", "0", "0.0%", "" if share is None else f"{share:.1%}")
    console.print(table)


def _counted(named: dict[str, Any], sentence: str) -> list[str]:
    if not named["count"]:
        return []
    shown = ", ".join(named["examples"]) + (", …" if named["count"] > len(named["examples"]) else "")
    return [f"{sentence.format(format(named['count'], ','))}: {shown}."]


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    left = {"", "split", "collection", "splits", "grades", "length in", "labels by training frequency"}
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


_FILLED = ("title", "text", "metadata")
