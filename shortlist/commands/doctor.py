"""`shortlist doctor`: what this machine and environment can do, and what needs attention."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from shortlist.errors import MissingExtraError
from shortlist.manifest import library_versions


def doctor(*, as_json: bool = False) -> dict[str, Any]:
    """Collect versions, devices, OpenMP runtimes, FAISS usability, free memory and disk; print them.

    Returns the report; its `attention` list holds one sentence for each thing that may bite.
    """
    report = examine()
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report)
    return report


def examine() -> dict[str, Any]:
    """The report as a dictionary: versions, cpu, devices, faiss, openmp, memory_gib, cache, attention."""
    import torch

    attention: list[str] = []
    faiss = _faiss()
    devices = ["cpu"]
    devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    if not faiss["available"]:
        attention.append(f"FAISS is not usable ({faiss['reason']}); exact indexes work without it.")
    elif torch.cuda.is_available() and not faiss["gpu"]:
        attention.append(f"FAISS runs on the CPU only ({faiss['reason']}); exact search on the GPU goes through torch.")
    runtimes = openmp_runtimes()
    if len({_family(name) for name in runtimes}) > 1 and platform.system() == "Darwin":
        attention.append(
            f"several OpenMP runtimes are loaded ({', '.join(runtimes)}); "
            "if the process aborts or hangs, use --index exact."
        )
    cache = Path(os.environ.get("SHORTLIST_CACHE", "~/.cache/shortlist")).expanduser()
    existing = next(path for path in [cache, *cache.parents] if path.exists())
    writable = os.access(existing, os.W_OK)
    free_disk = shutil.disk_usage(existing).free / 2**30
    if not writable:
        attention.append(f"the cache {cache} cannot be written; set SHORTLIST_CACHE to a folder that can.")
    if free_disk < 1:
        attention.append(f"only {free_disk:.1f} GiB of disk are free at {existing}.")
    memory = available_memory()
    if memory is not None and memory < 2:
        attention.append(f"only {memory:.1f} GiB of memory are free; lower --batch-tokens.")
    return {
        "versions": library_versions(),
        "platform": platform.platform(),
        "cpu": {
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "devices": devices,
        "faiss": faiss,
        "openmp": runtimes,
        "memory_free_gib": None if memory is None else round(memory, 1),
        "cache": {"path": str(cache), "writable": writable, "disk_free_gib": round(free_disk, 1)},
        "offline": os.environ.get("HF_HUB_OFFLINE") == "1",
        "attention": attention,
    }


def _faiss() -> dict[str, Any]:
    """Whether FAISS can be used on the CPU and on a GPU, and why not."""
    from shortlist.indexes.faiss import gpu_status, import_faiss

    try:
        import_faiss()
    except MissingExtraError as error:
        return {"available": False, "gpu": False, "reason": str(error)}
    gpu, reason = gpu_status()
    return {"available": True, "gpu": gpu, "reason": reason}


def openmp_runtimes() -> list[str]:
    """File names of the OpenMP libraries loaded in this process (Linux only; empty elsewhere)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return sorted(set(re.findall(r"[^/\s]*(?:libgomp|libomp|libiomp)[^/\s]*", maps.read_text())))


def available_memory() -> float | None:
    """Memory that can be had without swapping, in GiB; None where the system does not say."""
    information = Path("/proc/meminfo")
    if not information.exists():
        return None
    match = re.search(r"MemAvailable:\s+(\d+) kB", information.read_text())
    return int(match.group(1)) / 2**20 if match else None


def _family(library: str) -> str:
    return next(family for family in ("libgomp", "libiomp", "libomp") if family in library)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    table.add_row("platform", report["platform"])
    cpu = report["cpu"]
    table.add_row("cpu", f"{cpu['cores']} cores, {cpu['torch_threads']} torch threads, {cpu['capability']}")
    table.add_row("devices", ", ".join(report["devices"]))
    faiss = report["faiss"]
    table.add_row("faiss", f"CPU {'yes' if faiss['available'] else 'no'}, GPU {'yes' if faiss['gpu'] else 'no'}"
                  + (f" ({faiss['reason']})" if faiss["reason"] else ""))  # fmt: skip
    table.add_row("openmp", ", ".join(report["openmp"]) or "not known")
    memory = report["memory_free_gib"]
    table.add_row("memory", "not known" if memory is None else f"{memory} GiB free")
    table.add_row("cache", f"{report['cache']['path']}, {report['cache']['disk_free_gib']} GiB free")
    console = Console()
    console.print(table)
    for sentence in report["attention"]:
        console.print(f"! {sentence}")
    if not report["attention"]:
        console.print("Nothing needs attention.")
