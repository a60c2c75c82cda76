"""Training configuration: YAML → pydantic models → resolved dump, with overrides by dotted key.

A configuration is a packaged name (`scifact-dual-encoder`) or a YAML file. `base:` inherits one other
file; later layers win: base, file, command line. Unknown keys are errors that name the nearest valid key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from shortlist.errors import ConfigError, MissingInputError
from shortlist.files import atomic_open
from shortlist.settings import PER_QUERY, TrainConfig, nearest, negative_sources

CONFIGS = Path(__file__).parent / "configs"


def packaged_configs() -> list[str]:
    """Names of the recipes that ship with the package, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def load_config(name_or_path: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The resolved configuration of a packaged recipe or YAML file under `key=value` overrides.

    Raises:
        ConfigError: an unknown key, a wrong type or value; the message has the dotted key, the file
            and the nearest valid name.
        MissingInputError: no such file.
    """
    path = _locate(str(name_or_path), None)
    values = _merge(_load_layers(path, ()), _normalised(parse_overrides(overrides)))
    # Each file was checked by itself: what is wrong now comes from the overrides or from how the layers meet.
    return build_config(values, source=f"{name_or_path} with the overrides" if overrides else str(name_or_path))


def apply_overrides(config: TrainConfig, overrides: Iterable[str]) -> TrainConfig:
    """`config` with `section.key=value` strings over it. Raises ConfigError as load_config does."""
    values = _merge(config.model_dump(), _normalised(parse_overrides(overrides)))
    return build_config(values, source="the configuration with the overrides")


def build_config(values: Mapping[str, Any], *, source: str = "configuration") -> TrainConfig:
    """Validate a nested mapping; `source` names it in messages."""
    try:
        return TrainConfig.model_validate(_normalised(values))
    except ValidationError as error:
        sentences = [_sentence(dict(detail)) for detail in error.errors()]
        raise ConfigError(f"{source}: " + " ".join(sentences)) from None


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Nested mapping from `section.key=value` strings; values are YAML (`1e-4` is a number, `[a, b]` a list)."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(parts):
            raise ConfigError(f"override {override!r} is not of the form section.key=value, as training.max_steps=100.")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            raise ConfigError(f"override {override!r}: {text!r} is not a YAML value; quote it.") from None
        if parts == ["loss"] and isinstance(value, str):
            parts = ["loss", "name"]
        inner = values
        for depth, part in enumerate(parts[:-1]):
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"override {override!r}: {'.'.join(parts[: depth + 1])} has one value by an earlier override."
                )
        inner[parts[-1]] = value
    return values


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal value."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def write_config(config: TrainConfig, path: str | Path) -> None:
    """Write `dump_config(config)` atomically."""
    with atomic_open(path) as handle:
        handle.write(dump_config(config))


def differing_keys(first: TrainConfig, second: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, each with both values; empty for equal configurations."""
    left, right = flatten(first.model_dump()), flatten(second.model_dump())
    return {
        key: (left.get(key), right.get(key)) for key in [*left, *(key for key in right if key not in left)]
        if left.get(key) != right.get(key)
    }  # fmt: skip


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping → dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _locate(name: str, relative_to: Path | None) -> Path:
    """File of a configuration: beside the file that names it, as given, or packaged."""
    candidates = [Path(name)] if relative_to is None else [relative_to / name, Path(name)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if name in packaged_configs():
        return CONFIGS / f"{name}.yaml"
    if "/" in name or name.endswith((".yaml", ".yml")):
        raise MissingInputError(f"configuration file {name} does not exist; packaged: {', '.join(packaged_configs())}.")
    raise ConfigError(
        f"no configuration is called {name!r}{nearest(name, packaged_configs()) or '.'} "
        f"Packaged: {', '.join(packaged_configs())}; or give a YAML file."
    )


def _load_layers(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's values over those of the file its `base:` names."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base leads back to a file that is already being read; break the circle.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8."
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}.") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections (model, data, loss, training), found {_kind(values)}.")
    base = values.pop("base", None)
    values = _normalised(values)
    # Checked file by file, so that the message names the file that holds the mistake.
    build_config(values, source=str(path))
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: expected the name or path of one configuration, found {_kind(base)}.")
    return _merge(_load_layers(_locate(base, path.parent), (*seen, path.resolve())), values)


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any], *, top: bool = True) -> dict[str, Any]:
    """`upper` over `lower`, section by section.

    A new loss name drops the other loss's options, negatives that sample none drop the number sampled below.
    """
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if not (isinstance(value, Mapping) and isinstance(below, Mapping)):
            merged[key] = value
        elif top and key == "loss" and value.get("name", below.get("name")) != below.get("name"):
            merged[key] = dict(value)
        else:
            merged[key] = _merge(below, value, top=False)
            if top and key == "data" and "num_negatives" not in value and not _takes_a_number(value.get("negatives")):
                merged[key].pop("num_negatives", None)
    return merged


def _takes_a_number(negatives: Any) -> bool:
    """Whether data.num_negatives means something beside these negatives; True for what is not a valid setting."""
    try:
        return negatives is None or any(
            source.name in PER_QUERY and source.count is None for source in negative_sources(negatives)
        )
    except (ValueError, TypeError):
        return True


def _normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    """Spell out the shorthand `loss: name`; an empty section is an absent one."""
    spelled = {key: value for key, value in values.items() if value is not None or key not in TrainConfig.model_fields}
    if isinstance(spelled.get("loss"), str):
        spelled["loss"] = {"name": spelled["loss"]}
    return spelled


def _sentence(detail: dict[str, Any]) -> str:
    """One pydantic error as a sentence: dotted key, what was expected, what was found."""
    location = [str(part) for part in detail["loc"]]
    if detail["type"] == "value_error":
        return f"{detail['ctx']['error']}"
    if detail["type"] == "extra_forbidden":
        section = _section_at(location[:-1])
        names = list(section.model_fields) if section is not None else []
        owner = ".".join(location[:-1]) or "the configuration"
        hint = nearest(location[-1], names) or f"; {owner} takes {', '.join(names)}."
        return f"unknown key {'.'.join(location)}{hint}"
    # Unions add the member's name to the location; keep only parts that are keys of the file.
    key = ".".join(part for part in location if re.fullmatch(r"[a-z0-9_]+", part) and part not in _TYPE_NAMES)
    expected = re.sub(r"^Input should be (a |an )?", "", detail["msg"]).removeprefix("valid ")
    return f"{key}: expected {expected}, found {_kind(detail['input'])}."


_TYPE_NAMES = {"str", "int", "float", "bool", "none"}


def _section_at(location: list[str]) -> type[BaseModel] | None:
    """The section class a dotted location leads to."""
    section: type[BaseModel] = TrainConfig
    for part in location:
        field = section.model_fields.get(part)
        if field is None:
            return None
        options = [field.annotation, *get_args(field.annotation)]
        classes = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        if not classes:
            return None
        section = classes[0]
    return section


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return f"the {'text' if isinstance(value, str) else 'number'} {value!r}"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else type(value).__name__


class _Loader(yaml.SafeLoader):
    """Safe YAML with the numbers and truth values of YAML 1.2: `1e-4` is a number, `no` and `on` are text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in yaml, but a key given twice is refused: the first value would be lost silently."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else str(key))
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """The writer that belongs to `_Loader`."""


_FLOAT = re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
                    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")  # fmt: skip
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        character: [(tag, pattern) for tag, pattern in resolvers
                    if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int",
                                   "tag:yaml.org,2002:timestamp")]
        for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }  # fmt: skip
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
