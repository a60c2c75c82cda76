"""The sections of a training configuration, as pydantic models: every key, its type, its default and what it means.

`shortlist.config` reads them from YAML and overrides.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    index: str = "exact"  # or hnsw, ivf-flat …, or a FAISS factory string
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


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of `choices`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
