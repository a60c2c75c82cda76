"""What a run will need, computed from sizes alone: no model is loaded, nothing is encoded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from shortlist.settings import TrainConfig

FLOAT = 4


@dataclass(frozen=True)
class ModelSize:
    """Parameters of the encoder (both towers), those that are trained, and the shape of its layers (0: static)."""

    parameters: int
    trainable: int
    layers: int = 0
    width: int = 0
    heads: int = 0
    max_length: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training step on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    scores: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.scores

    def lines(self) -> list[str]:
        """One sentence a part, largest figures last."""
        parts = {
            "weights (float32)": self.weights,
            "gradients": self.gradients,
            "optimiser (two moments)": self.optimizer,
            "activations, at most": self.activations,
            "score matrix and temporaries": self.scores,
            "total": self.total,
        }
        return [f"{name}: {size(count)}" for name, count in parts.items()]


def size(count: float) -> str:
    """Bytes for people: 1.50 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def model_size(folder: Path, config: TrainConfig) -> ModelSize:
    """Sizes of a model folder from its config.json and the headers of its safetensors files."""
    parameters = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                shape = tensors.get_slice(name).get_shape()
                count = 1
                for dimension in shape:
                    count *= dimension
                parameters += count
    settings = {}
    if (folder / "config.json").is_file():
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = int(settings.get("num_hidden_layers") or settings.get("n_layers") or settings.get("n_layer") or 0)
    width = int(settings.get("hidden_size") or settings.get("dim") or settings.get("n_embd") or 0)
    heads = int(settings.get("num_attention_heads") or settings.get("n_heads") or settings.get("n_head") or 0)
    longest = int(settings.get("max_position_embeddings") or 0)
    return sized(parameters * (1 if config.model.shared else 2), layers, width, heads, longest, config)


def sized(parameters: int, layers: int, width: int, heads: int, longest: int, config: TrainConfig) -> ModelSize:
    """A ModelSize; with LoRA only two thin matrices for each of about six linear layers a block are trained."""
    lora = config.model.lora
    trainable = parameters if lora is None else 6 * layers * 2 * width * lora.r
    return ModelSize(parameters, trainable, layers, width, heads or max(1, width // 64), longest)


def tokens_per_step(config: TrainConfig, documents: int, *, longest: int, query: int, document: int) -> int:
    """Upper bound on the tokens of one forward pass: every text at its maximum length."""
    limit = longest or 512
    query_length = min(config.model.query_max_length or query or limit, limit)
    document_length = min(config.model.doc_max_length or document or limit, limit)
    return config.training.batch_size * query_length + pool_size(config, documents) * document_length


def pool_size(config: TrainConfig, documents: int) -> int:
    """Documents scored in one step, at most (one positive a query assumed unless max_positives says more)."""
    data, training = config.data, config.training
    if data.negatives == "all":
        return documents
    negatives = 0 if data.negatives == "in_batch" else (data.num_negatives or 100)
    return min(documents or 10**12, training.batch_size * ((training.max_positives or 1) + negatives))


def estimate_memory(config: TrainConfig, model: ModelSize, documents: int, tokens: int, dim: int) -> MemoryEstimate:
    """Memory of a step with AdamW and float32 master weights.

    Activations of a transformer block: 34 bytes a token and hidden unit plus 5 a token pair and head in half
    precision, twice that in float32 (Korthikanti et al. 2022, section 4.1); with gradient checkpointing only the
    block inputs stay. A static encoder keeps token ids and one vector a text.
    """
    pool = pool_size(config, documents)
    texts = config.training.batch_size + pool
    if model.layers:
        length = tokens / max(1, texts)
        scale = 1 if config.training.dtype in ("auto", "bfloat16", "float16") else 2
        block = tokens * (34 * model.width + 5 * model.heads * length) * scale
        if config.training.gradient_checkpointing:
            activations = tokens * model.width * 2 * scale * model.layers + block
        else:
            activations = block * model.layers
    else:
        activations = tokens * 8 + texts * dim * FLOAT * 3
    scores = config.training.batch_size * pool * FLOAT * 4
    return MemoryEstimate(
        weights=model.parameters * FLOAT,
        gradients=model.trainable * FLOAT,
        optimizer=model.trainable * 2 * FLOAT,
        activations=int(activations),
        scores=scores,
    )
