"""Finding the files of an extreme-classification folder by name and content (layouts: see shortlist.data.xc)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shortlist.data.lines import find_file, first_line

STEMS = {"train": ("trn", "train"), "test": ("tst", "test")}
LABEL_NAMES: dict[str, tuple[str, ...]] = {
    "json": ("lbl.json", "lbl.raw.json", "Yf.txt", "Y.txt", "label_map.txt"),
    "text": ("Y.txt", "Yf.txt", "label_map.txt", "output-items.txt"),
    "pecos": ("output-labels.txt", "labels.txt", "label.txt", "Y.txt", "output-items.txt"),
}
_POINT_NAMES = {
    "json": ("{}.json", "{}.raw.json"),
    "text": ("{}_X.txt", "X.{}.txt", "{}_raw_texts.txt"),
    "pecos": ("{}.txt",),
}


@dataclass(frozen=True)
class Layout:
    """The files of one folder: kind `json`, `text` or `pecos`, the label file, and per split the other files."""

    kind: str
    labels: Path | None
    points: dict[str, Path]
    matrices: dict[str, Path] = field(default_factory=dict)
    filters: dict[str, Path] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """Every file of the layout."""
        labels = [self.labels] if self.labels else []
        return [*labels, *self.points.values(), *self.matrices.values(), *self.filters.values()]


def find_layout(path: Path) -> Layout | None:
    """The layout of a folder, None if it is none of the known ones."""
    if not path.is_dir():
        return None
    folders = [path, path / "raw"] if path.name != "raw" else [path, path.parent]
    for kind, names in _POINT_NAMES.items():
        points = {}
        for split, stems in STEMS.items():
            found = _first(folders[:1] if path.name == "raw" else folders, [n.format(s) for n in names for s in stems])
            if found is not None:
                points[split] = found
        label_file = _first(folders, LABEL_NAMES[kind])
        if not points or not _plausible(kind, points, label_file):
            continue
        matrices, filters = {}, {}
        for split in points:
            stems = STEMS[split]
            matrix = _first(folders, [n.format(s) for s in stems for n in ("Y.{}.npz", "{}_X_Y.npz", "{}_X_Y.txt")])
            if matrix is not None and kind == "text":
                matrices[split] = matrix
            pairs = _first(folders, [f"filter_labels_{s}.txt" for s in reversed(stems)])
            if pairs is not None:
                filters[split] = pairs
        return Layout(kind, label_file, points, matrices, filters)
    return None


def _plausible(kind: str, points: dict[str, Path], labels: Path | None) -> bool:
    """Whether files of these names hold what the layout says; `train.json` alone may be anything."""
    some = next(iter(points.values()))
    if kind == "json":
        return labels is not None or some.name.startswith(("trn", "tst"))
    if kind == "text":
        return labels is not None or some.name.startswith(("trn_X", "tst_X"))
    names, tab, _ = first_line(some).partition("\t")
    return labels is not None and bool(tab) and all(part.strip().isdigit() for part in names.split(",") if part)


def _first(folders: list[Path], names: Sequence[str]) -> Path | None:
    for folder in folders:
        for name in names:
            found = find_file(folder, name)
            if found is not None:
                return found
    return None
