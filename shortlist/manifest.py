"""What every output directory records about how it came to be: command, versions, machine, code state."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shortlist._version import __version__

LIBRARIES = (
    "torch", "transformers", "tokenizers", "accelerate", "datasets", "peft", "faiss-cpu", "ir-measures",
    "bm25s", "numpy", "scipy", "safetensors",
)  # fmt: skip


def library_versions() -> dict[str, str]:
    """Versions of this package, Python and the libraries that can change a number; absent ones are left out."""
    versions = {"shortlist": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return versions


def git_state() -> dict[str, Any] | None:
    """Commit and cleanness of the git checkout in the working directory; None outside one."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def run_manifest(**extra: Any) -> dict[str, Any]:
    """Provenance of one command: `extra` keys first, then command line, versions, machine, git state, UTC time."""
    return {
        **extra,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": library_versions(),
        "machine": {"platform": platform.platform(), "cpu_count": os.cpu_count()},
        "git": git_state(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=10)
    return result.stdout.strip()
