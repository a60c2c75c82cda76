"""Training configuration: YAML → pydantic models → resolved dump, with overrides by dotted key.

A configuration is a packaged name (`scifact-dual-encoder`) or a YAML file. `base:` inherits one other
file; later layers win: base, file, command line. Unknown keys are errors that name the nearest valid key.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shortlist.errors import ConfigError, MissingInputError
from shortlist.files import atomic_open

CONFIGS = Path(__file__).parent / "configs"

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
# A whole number of steps, or a fraction of all steps.
Steps = Annotated[float, Field(gt=0)]
Bound = Annotated[float, Field(ge=0, lt=1)]

# Where the documents of a step come from; those of the second line take a number, "mined(5)".
SOURCES = ("in_batch", "all", "given", "bm25", "sampled", "mined")
COUNTED = ("given", "bm25", "sampled", "mined")
# Those that take data.num_negatives where they are written without a number.
PER_QUERY = ("given", "bm25", "mined")


@dataclass(frozen=True)
class NegativeSource:
    """One source of `data.negatives`: its name, and the number of documents it gives (None: all it has).

    The number of `given`, `bm25` and `mined` is for a query and step, that of `sampled` for the whole batch.
    """

    name: str
    count: int | None = None

    def __str__(self) -> str:
        return self.name if self.count is None else f"{self.name}({self.count})"


def negative_sources(value: str | list[str]) -> tuple[NegativeSource, ...]:
    """Parse `data.negatives`: `all`, `mined(5)`, or a list of such.

    Raises:
        ValueError: an unknown source, a number where none belongs or none where one is needed, a source given twice.
    """
    texts = [value] if isinstance(value, str) else value
    sources = tuple(_negative_source(text) for text in texts)
    names = [source.name for source in sources]
    if not names:
        raise ValueError("data.negatives is an empty list; in_batch is the plainest choice.")
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise ValueError(f"data.negatives has {repeated!r} twice.")
    if "all" in names and set(names) - {"all", "in_batch"}:
        raise ValueError("data.negatives has 'all', which leaves nothing for another source to add; keep 'all' alone.")
    return sources


def _negative_source(text: str) -> NegativeSource:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*", text)
    name = match.group(1) if match else text
    if match is None or name not in SOURCES:
        raise ValueError(
            f"data.negatives: expected in_batch, all, given, bm25, sampled(n) or mined(k), found the text {text!r}"
            f"{nearest(name, SOURCES) or '.'}"
        )
    count = int(match.group(2)) if match.group(2) else None
    if count == 0:
        raise ValueError(f"data.negatives: {text} draws no document; leave it out, or give a number above 0.")
    if count is not None and name not in COUNTED:
        raise ValueError(f"data.negatives: {name} takes no number, found {text}.")
    if count is None and name == "sampled":
        raise ValueError("data.negatives: sampled needs the number of documents a batch, as sampled(4096).")
    return NegativeSource(name, count)


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values keep their type, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Prompts(Section):
    """Text put in front of every query and every document."""

    query: str = ""
    document: str = ""


class LoraConfig(Section):
    """Low-rank adapters on the backbone (peft); the base weights stay frozen."""

    r: Count = 16
    alpha: Count = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: list[str] | str | None = None  # None: peft's choice for the architecture


class ModelConfig(Section):
    """Which model is trained and how it reads text; null keeps what the model's folder says."""

    kind: str = "dual_encoder"
    path: str = "shortlist/static-en"
    pooling: Literal["mean", "cls", "last"] | None = None
    normalise: bool | None = None
    dim: Count | None = None
    projection_dim: Count | None = None  # adds a new dense layer to this dimension
    prompts: Prompts | None = None
    query_max_length: Count | None = None  # tokens
    doc_max_length: Count | None = None  # tokens
    shared: bool = True
    lora: LoraConfig | None = None
    # text: encoded; vectors: a free vector and a bias each (one-vs-all head); text_and_vectors: text plus a free vector
    document_side: Literal["text", "vectors", "text_and_vectors"] = "text"
    freeze_encoder: bool = False  # the text encoder is a fixed feature extractor


class MiningConfig(Section):
    """How `mined(k)` finds hard negatives: search with the encoder of the moment, then leave out what is too good.

    A known positive is never a negative. The score of a query's positives is their mean.
    """

    depth: Count = 100  # documents asked for a query
    start_epoch: Annotated[int, Field(ge=0)] = 0  # the first epoch with mined negatives
    refresh_epochs: Count = 5
    index: str = "exact"  # or a FAISS factory string
    skip: Annotated[int, Field(ge=0)] = 0  # best ranks passed over
    min_score: float | None = None
    max_score: float | None = None
    relative_margin: Bound | None = None  # drop above (1 - relative_margin) times the positives' score
    margin: Annotated[float, Field(ge=0)] | None = None  # drop above the positives' score minus the margin


class DataConfig(Section):
    """Where the training data comes from and which documents act as negatives."""

    path: str | None = None
    split: str = "train"
    # auto: a part split off the training queries; none: no selection; or the name of a split.
    dev: str = "auto"
    dev_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    dev_queries: Count | None = None
    dev_documents: Count | None = None
    # One or a list of: in_batch, all, given, bm25, sampled(n), mined(k). The batch's positives are always in the pool.
    negatives: str | list[str] = "in_batch"
    num_negatives: Annotated[int, Field(ge=0)] | None = None  # of given, bm25 and mined without a number; null: all
    mining: MiningConfig = MiningConfig()
    share_negatives: bool = True  # false: a query sees only its own documents (classification-like data)
    lists: str | None = None  # a file of ranked lists or hard negatives beside the collection
    title_queries: bool = False  # every document's title is a further query for its text
    graded: bool = False  # weigh positives by their grade
    propensity_weights: bool = False  # weigh positives by their inverse propensity (rare labels more)
    template: str | None = None
    on_empty: Literal["keep", "skip", "error"] = "keep"
    max_queries: Count | None = None  # the first N training queries, for trials

    @property
    def sources(self) -> tuple[NegativeSource, ...]:
        """`negatives` parsed; `num_negatives` is the number of the sources that take it and have none."""
        return tuple(
            NegativeSource(source.name, self.num_negatives)
            if source.count is None and source.name in PER_QUERY
            else source
            for source in negative_sources(self.negatives)
        )


class LossConfig(BaseModel):
    """A registry name or import path `package.module:Name`, and the options of that loss."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "info_nce"

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name: keyword arguments of the loss class."""
        return dict(self.model_extra or {})


class TrainingConfig(Section):
    """Optimiser, schedule, batch and evaluation settings, under the names of `transformers.TrainingArguments`."""

    learning_rate: Positive = 2e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    optim: str = "adamw_torch_fused"
    lr_scheduler_type: str = "linear"
    warmup_steps: Annotated[float, Field(ge=0)] = 0.1  # a count, or below 1 a fraction of all steps
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    num_train_epochs: Positive = 1.0
    max_steps: Count | None = None
    batch_size: Count = 32  # queries, per device
    gradient_accumulation_steps: Count = 1
    drop_last: bool = False
    temperature: Positive = 0.05
    max_positives: Count | None = None  # positives a query brings into the pool, drawn anew each step; null: all
    sample_positives: Count | None = None  # positives scored a query and step, drawn by relevance; null: all, exactly
    micro_batch_size: Count | None = None  # texts at once, both sides, by gradient cache; null: the whole batch
    score_memory: Count | None = None  # MiB for blocks of the score matrix; null: 256, on an accelerator 1024
    logit_adjustment: float = 0.0  # tau: adds tau * log(training frequency) to the logits in the loss
    head_learning_rate: Positive | None = None  # of free vectors and biases; null: learning_rate
    matryoshka: list[Count] | None = None  # dimensions whose losses are summed
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    gradient_checkpointing: bool = False
    eval_steps: Steps | None = None  # null: once an epoch
    save_steps: Steps | None = None  # null: with every evaluation
    save_total_limit: Count | None = 2
    logging_steps: Count = 10
    metric_for_best_model: str = "nDCG@10"
    early_stopping_patience: Count | None = None  # evaluations without a new best
    eval_at_start: bool = True
    dataloader_num_workers: Annotated[int, Field(ge=0)] = 0
    report_to: list[str] | str = "none"


class ExpectedConfig(Section):
    """Sizes a recipe's author saw, for `--dry-run` where data or model are not on this machine."""

    queries: Count | None = None
    documents: Count | None = None
    parameters: Count | None = None
    layers: Count | None = None
    width: Count | None = None


class TrainConfig(Section):
    """Everything `shortlist train` needs, resolved."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    expected: ExpectedConfig = ExpectedConfig()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42  # the range numpy takes
    deterministic: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        sources = negative_sources(self.data.negatives)
        names = {source.name for source in sources}
        if self.data.num_negatives and not any(one.name in PER_QUERY and one.count is None for one in sources):
            raise ValueError(
                f"data.num_negatives is {self.data.num_negatives} but data.negatives is {self.data.negatives!r}, "
                "which has no use for it; leave data.num_negatives out, or set data.negatives to bm25, given or mined."
            )
        if names & {"all", "sampled"} and not self.data.share_negatives:
            raise ValueError(
                f"data.negatives is {self.data.negatives!r} but data.share_negatives is false; the two exclude each "
                "other."
            )
        return self


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


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of `choices`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


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
