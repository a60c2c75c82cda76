"""Public names of a package that load on first use, so that importing the package stays fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """`(__getattr__, __all__)` of `package`, from name → module inside the package that defines it."""
    names = list(modules)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, names
