"""What every benchmark shares: arguments, medians, alternating timings, the table and the JSON file."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shortlist.files import write_json
from shortlist.manifest import run_manifest


def arguments(documentation: str | None) -> argparse.ArgumentParser:
    """A parser with --output, described by the script's own docstring."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    return parser


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def alternate(functions: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each function, one round after the other, so that a drift of the machine meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + rounds):
        for name, function in functions.items():
            gc.collect()
            start = time.perf_counter()
            function()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def anonymous_mib() -> float:
    """RssAnon of this process in MiB (Linux)."""
    return status_mib("RssAnon", Path("/proc/self/status").read_text())


def status_mib(key: str, text: str) -> float:
    match = re.search(rf"{key}:\s+(\d+) kB", text)
    return int(match.group(1)) / 1024 if match else float("nan")


def report(name: str, rows: Sequence[Mapping[str, Any]], output: Path | None, **extra: Any) -> None:
    """Print `rows` as a table and, with `output`, write them as JSON with versions and machine."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    for line in [columns, ["-" * width for width in widths], *cells]:
        sys.stdout.write("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() + "\n")
    for key, value in extra.items():
        sys.stdout.write(f"{key}: {json.dumps(value)}\n")
    if output:
        write_json(output, run_manifest(benchmark=name, rows=list(rows), **extra, processor=processor()))


def processor() -> str:
    """Model name of the CPU, as the system gives it."""
    information = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", information.read_text()) if information.exists() else None
    return match.group(1) if match else platform.processor()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
