"""The dependency rule and the import costs that docs/architecture.md promises."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path

import pytest

import shortlist

PACKAGE = Path(shortlist.__file__).parent
# Left to right: a module may import only from its own layer's folder or from layers to its left.
LAYERS = [
    {"errors", "_version", "_lazy"},
    {"types", "files", "devices"},
    {"manifest", "settings", "config"},
    {"data", "losses", "metrics"},
    {"indexes", "training"},
    {"retrieval"},
    {"ranking"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def modules():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def part(relative: Path) -> str:
    return relative.parts[0].removesuffix(".py")


def imported_parts(relative: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / relative).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative}: imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("shortlist.")} & set(LEVEL)


@pytest.mark.parametrize("relative", modules(), ids=str)
def test_nothing_imports_to_the_right_of_itself(relative):
    own = part(relative)
    if own == "__init__":
        return
    for other in imported_parts(relative):
        assert other == own or LEVEL[other] < LEVEL[own] or LEVEL[other] == LEVEL[own] <= 2, (
            f"{relative} imports shortlist.{other}"
        )


def test_only_the_faiss_module_imports_faiss():
    for relative in modules():
        tree = ast.parse((PACKAGE / relative).read_text())
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            if any(name.split(".")[0] == "faiss" for name in names):
                assert str(relative) == "indexes/faiss.py", relative
    top = ast.parse((PACKAGE / "indexes/faiss.py").read_text()).body
    assert not any("faiss" in ast.dump(node) for node in top if isinstance(node, ast.Import)), (
        "faiss is imported lazily"
    )


def test_every_module_imports():
    # user-reports H.170: imports of undeclared packages
    for relative in modules():
        import_module(".".join(["shortlist", *relative.with_suffix("").parts]).removesuffix(".__init__"))


def test_every_import_is_declared():
    # user-reports H.170: the package installs what it imports; zstandard is asked for in a sentence
    named_otherwise = {"stemmer": "pystemmer", "faiss": "faiss-cpu", "yaml": "pyyaml"}
    requirements = requires("shortlist") or []
    declared = {re.split(r"[^A-Za-z0-9._-]", line)[0].lower().replace("_", "-") for line in requirements}
    for relative in modules():
        for node in ast.walk(ast.parse((PACKAGE / relative).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for root in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                distribution = named_otherwise.get(root.lower(), root.lower().replace("_", "-"))
                assert distribution in declared | {"shortlist", "typing-extensions"}, f"{relative} imports {root}"


@pytest.mark.parametrize("statement", ["import shortlist", "import shortlist.cli", "import shortlist.types"])
def test_import_and_help_stay_light(statement):
    heavy = ("torch", "transformers", "faiss", "numpy", "datasets")
    code = f"{statement}; import sys; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_nothing_unpickles():
    # safe to open: no pickle module, no object arrays, torch.load only for plain tensors
    for relative in modules():
        for node in ast.walk(ast.parse((PACKAGE / relative).read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not {"pickle", "dill", "joblib", "shelve"} & {n.split(".")[0] for n in names}, relative
            if isinstance(node, ast.Call):
                values = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
                assert values.get("allow_pickle") is not True, relative
                if ast.unparse(node.func) == "torch.load":
                    assert values.get("weights_only") is True, relative


def test_every_public_name_resolves():
    for name in shortlist.__all__:
        assert getattr(shortlist, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Indx'"):
        _ = shortlist.Indx
