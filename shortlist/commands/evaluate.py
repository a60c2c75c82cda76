"""`shortlist evaluate`: runs against qrels, one table with a column a run.

Arguments are told apart by what they are: one that parses as a measure is a measure (a file called `AP` is written
`./AP`), everything else must exist as a file. Without a collection the first file is the qrels.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.files import atomic_open, refuse_directory, refuse_existing
from shortlist.metrics import Evaluation, evaluate, is_measure, looks_like_measure, parse_measure
from shortlist.metrics.evaluation import DEFAULT_MEASURES, format_count, resolve_measures
from shortlist.metrics.frequency import format_groups
from shortlist.metrics.names import PSP
from shortlist.metrics.xc import parse_propensity
from shortlist.types import Qrels

if TYPE_CHECKING:
    from rich.table import Table

    from shortlist.data import Collection


def evaluate_files(
    arguments: Sequence[str],
    *,
    data: str | Path | Collection | None = None,
    split: str | None = None,
    as_json: bool = False,
    per_query: str | os.PathLike[str] | None = None,
    exclude_self: str | bool = "auto",
    by_frequency: bool = False,
    propensity: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Evaluate run files and print a table (or JSON) to stdout; returns what `--json` prints.

    Args:
        arguments: run files and measures in any order; without `data`, the first file is the qrels.
        data: collection (path or name) that gives qrels, default measures, self-retrieval rule, filters and
            propensities.
        split: split of the collection; its default split if None.
        as_json: print `{"runs": [{"name", "mean", "counts"}]}` instead of the table; with what changes the numbers
            as "settings" where there is any, and "by_frequency" where that is asked for.
        per_query: file for one JSON line a run and query, `{"run", "query_id", "measures"}`.
        exclude_self: `true`, `false` or `auto` (what the collection's registry entry says; false without one).
        by_frequency: also print the measures by training frequency of the labels: deciles, head, torso, tail,
            zero-shot.
        propensity: family (`other`, `amazon`, `wikipedia`) or two numbers `A,B` for PSP@k; by default as the name of
            the collection says.
        overwrite: replace an existing `per_query` file.

    Raises:
        ConfigError: no run, an unknown measure or propensity, or an option that needs a collection without one.
        MissingInputError: a file that does not exist.
        DataError: a file that cannot be read, or a run and qrels that share no query.
    """
    measures, files = _sort_arguments(arguments)
    if per_query is not None:
        refuse_directory(per_query)
        refuse_existing(per_query, overwrite=overwrite)
    options: dict[str, Any] = {"exclude_self": _exclude_self(exclude_self)}
    if data is None:
        if split is not None:
            raise ConfigError(f"--split {split} needs a collection: give it with --data.")
        for option, given in (("--by-frequency", by_frequency), ("--propensity", propensity is not None)):
            if given:
                raise ConfigError(f"{option} needs training counts, and so a collection: give it with --data.")
        if len(files) < 2:
            raise ConfigError(
                f"evaluate needs qrels and at least one run, as in `shortlist evaluate QRELS RUN nDCG@10`; found "
                f"{len(files)} file{'s' * (len(files) != 1)}. With --data, the qrels come from the collection."
            )
        from shortlist.data import read_qrels

        qrels = read_qrels(files.pop(0))
        names = resolve_measures(measures or DEFAULT_MEASURES)
        options["exclude_self"] = bool(options["exclude_self"])
    else:
        if not files:
            raise ConfigError("evaluate needs at least one run file, as in `shortlist evaluate --data DIR out.run.gz`.")
        options["by_frequency"] = by_frequency
        if propensity is not None:
            options["propensity"] = parse_propensity(propensity)
        qrels, names = _from_collection(data, split, measures, options)
    evaluations = _named([_evaluate_file(file, qrels, names, options) for file in files], files)
    payload = {"runs": [_as_dict(one) for one in evaluations]}
    if per_query is not None:
        _write_per_query(per_query, evaluations)
    if as_json:
        sys.stdout.write(json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        print_table(evaluations)
    return payload


def print_table(evaluations: Sequence[Evaluation]) -> None:
    """One table on stdout, a column a run: measures, then counts, then what changes or explains the numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("measure")
    for evaluation in evaluations:
        table.add_column(evaluation.name, justify="right", overflow="fold")
    for measure in evaluations[0].measures:
        table.add_row(measure, *(f"{one.mean[measure]:.4f}" for one in evaluations))
    table.add_section()
    for key in dict.fromkeys(key for one in evaluations for key in one.counts):
        table.add_row(key, *(format_count(one.counts[key]) if key in one.counts else "" for one in evaluations))
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        # A pipe or a file has no width: wrap nothing there.
        console.width = 10_000
    console.print(table)
    for evaluation in evaluations:
        if evaluation.by_frequency:
            console.print(_frequency_table(evaluation))
    notes = [evaluation.notes() for evaluation in evaluations]
    for evaluation, own in zip(evaluations, notes, strict=True):
        for note in own:
            if not all(note in others for others in notes):
                console.print(f"{evaluation.name}: {note}", soft_wrap=True)
            elif own is notes[0]:  # what holds for all runs is said once
                console.print(note, soft_wrap=True)


def _frequency_table(evaluation: Evaluation) -> Table:
    from rich import box
    from rich.table import Table

    title = f"{evaluation.name}, by training frequency"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    heading, *rows = format_groups(evaluation.by_frequency)
    for number, name in enumerate(heading):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        if row[0] == "head":
            table.add_section()
        table.add_row(*row)
    return table


def _as_dict(evaluation: Evaluation) -> dict[str, Any]:
    found: dict[str, Any] = {"name": evaluation.name, "mean": evaluation.mean, "counts": evaluation.counts}
    if evaluation.settings:
        found["settings"] = evaluation.settings
    if evaluation.by_frequency:
        found["by_frequency"] = [
            asdict(group) | {"training_points": list(group.training_points)} for group in evaluation.by_frequency
        ]
    return found


def _sort_arguments(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Measures and files among the arguments; a name that is neither is refused as whichever it looks like."""
    measures, files = [], []
    for argument in arguments:
        if is_measure(argument):
            measures.append(parse_measure(argument))
        elif argument == "-" or Path(argument).exists():
            files.append(Path(argument))
        elif looks_like_measure(argument):
            try:
                parse_measure(argument)
            except ConfigError as error:
                raise ConfigError(f"{error} There is no file {argument!r} either.") from None
        else:
            raise MissingInputError(f"no file {argument!r} (and it is not the name of a measure).")
    return measures, files


def _exclude_self(value: str | bool) -> bool | None:
    """True or False as given, None for `auto`."""
    choices = {"auto": None, "true": True, "false": False}
    key = str(value).lower()
    if key not in choices:
        raise ConfigError(f"exclude_self is {value!r}; expected auto, true or false.")
    return choices[key]


def _from_collection(
    data: str | Path | Collection, split: str | None, measures: list[str], options: dict[str, Any]
) -> tuple[Qrels, list[str]]:
    """Qrels and measures of a collection; fills in `options` what its kind needs."""
    from shortlist.data import load_collection
    from shortlist.data.label_qrels import positive_counts

    collection = load_collection(data)
    split = split or collection.default_split
    qrels = collection.qrels(split)
    names = resolve_measures(measures or collection.measures)
    if options["exclude_self"] is None:
        options["exclude_self"] = collection.exclude_self
    options["binary_gain"] = collection.kind == "xc"
    if filters := collection.filters(split):
        options["filters"] = filters
    weighted = any(name.startswith(PSP + "@") for name in names)
    if weighted or options["by_frequency"]:
        if "train" not in collection.judged_splits:
            what, instead = (
                ("PSP@k weighs", "Ask for other measures, as P@5")
                if weighted
                else ("by_frequency groups", "Leave it out")
            )
            raise DataError(
                f"{collection.name}: {what} labels by their training frequency, and there is no train split with "
                f"judgements (it has {', '.join(collection.splits)}). {instead}."
            )
        train = collection.qrels("train")
        options |= {"train_counts": positive_counts(train), "num_train": len(train)}
        options.setdefault("propensity", collection.propensity)
    return qrels, names


def _evaluate_file(file: Path, qrels: Qrels, measures: list[str], options: dict[str, Any]) -> Evaluation:
    from shortlist.data import read_run

    run = read_run(file)
    try:
        return evaluate(qrels, run, measures, name=run.name or file.name, **options)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def _named(evaluations: list[Evaluation], files: list[Path]) -> list[Evaluation]:
    """Each run under its tag; under its file name where tags repeat, under its path where file names repeat too."""
    for rename in (lambda file: file.name, str):
        tally = Counter(evaluation.name for evaluation in evaluations)
        evaluations = [
            replace(evaluation, name=rename(file)) if tally[evaluation.name] > 1 else evaluation
            for evaluation, file in zip(evaluations, files, strict=True)
        ]
    return evaluations


def _write_per_query(path: str | os.PathLike[str], evaluations: list[Evaluation]) -> None:
    with atomic_open(path) as handle:
        for evaluation in evaluations:
            for query, values in evaluation.per_query.items():
                line = {"run": evaluation.name, "query_id": query, "measures": values}
                handle.write(json.dumps(line, ensure_ascii=False) + "\n")
