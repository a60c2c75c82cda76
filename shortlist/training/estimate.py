"""What a run will need, computed from sizes alone: no model is loaded, nothing is encoded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from shortlist.settings import TrainConfig

FLOAT, TOKEN_ID = 4, 8
MIB = 2**20
# Optimisers without two float32 moments a parameter.
MOMENTS = {"sgd": 0, "adafactor": 0, "rmsprop": 1, "adagrad": 1}


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
class StepSize:
    """What one step holds: the whole batch and pool, one device's part of them, and the longest texts in tokens."""

    queries: int
    documents: int
    own_queries: int
    own_documents: int
    query_length: int
    document_length: int

    @property
    def tokens(self) -> int:
        """Upper bound on the tokens that one device encodes: every text at its maximum length."""
        return self.own_queries * self.query_length + self.own_documents * self.document_length


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training step on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    vectors: int
    scores: int
    inputs: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Name for people → bytes."""
        return {
            "weights (float32)": self.weights,
            "gradients": self.gradients,
            "optimiser": self.optimizer,
            "activations, at most": self.activations,
            "vectors of the batch and their gradients": self.vectors,
            "blocks of the score matrix": self.scores,
            "token ids, at most": self.inputs,
        }

    def lines(self) -> list[str]:
        """One line a part, the total last."""
        return [f"{name}: {size(count)}" for name, count in [*self.parts().items(), ("total", self.total)]]


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
    parameters = columns = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                shape = tensors.get_slice(name).get_shape()
                parameters += math.prod(shape)
                columns = max(columns, shape[1] if len(shape) == 2 else 0)
    settings = {}
    if (folder / "config.json").is_file():
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = int(settings.get("num_hidden_layers") or settings.get("n_layers") or settings.get("n_layer") or 0)
    width = int(settings.get("hidden_size") or settings.get("dim") or settings.get("n_embd") or 0)
    heads = int(settings.get("num_attention_heads") or settings.get("n_heads") or settings.get("n_head") or 0)
    longest = int(settings.get("max_position_embeddings") or 0)
    return sized(parameters * (1 if config.model.shared else 2), layers, width or columns, heads, longest, config)


def sized(parameters: int, layers: int, width: int, heads: int, longest: int, config: TrainConfig) -> ModelSize:
    """A ModelSize; with LoRA only two thin matrices for each of about six linear layers a block are trained."""
    lora = config.model.lora
    trainable = parameters if lora is None else 6 * layers * 2 * width * lora.r
    if config.model.freeze_encoder:
        trainable = 0
    return ModelSize(parameters, trainable, layers, width, heads or max(1, width // 64), longest)


def free_vectors(config: TrainConfig, documents: int, dim: int) -> int:
    """Trained numbers that belong to single documents: a vector each, and a bias where there is no text side."""
    return {"text": 0, "text_and_vectors": dim, "vectors": dim + 1}[config.model.document_side] * documents


def vector_dim(config: TrainConfig, model: ModelSize) -> int:
    """Length of the vectors that are compared."""
    full = config.model.projection_dim or model.width or 256
    return min(config.model.dim or full, full)


def pool_size(config: TrainConfig, documents: int, *, queries: int | None = None, positives: float = 1.0) -> int:
    """Documents scored in one step, at most.

    Args:
        config: the configuration.
        documents: documents of the collection.
        queries: queries of a step, over all processes; None: one process.
        positives: mean number of positives of a query.
    """
    queries = config.training.batch_size if queries is None else queries
    if config.training.max_positives is not None:
        positives = min(config.training.max_positives, max(positives, 1.0))
    own, shared = positives, 0
    for source in config.data.sources:
        if source.name == "all":
            return documents
        if source.name == "sampled":
            shared += source.count or 0
        elif source.name in ("given", "bm25", "mined"):
            own += source.count or 100
    return min(documents, math.ceil(queries * own) + shared)


def step_size(
    config: TrainConfig,
    model: ModelSize,
    documents: int,
    *,
    processes: int = 1,
    positives: float = 1.0,
    lengths: tuple[int, int] | None = None,
) -> StepSize:
    """The sizes of a step.

    Args:
        config: the configuration.
        model: its model; `max_length` bounds the texts.
        documents: documents of the collection.
        processes: devices that share a step.
        positives: mean number of positives of a query.
        lengths: tokens of a query and of a document where the configuration does not bound them; None: the model's.
    """
    limit = model.max_length or 512
    query, document = lengths or (limit, limit)
    queries = config.training.batch_size * processes
    pool = pool_size(config, documents, queries=queries, positives=positives)
    return StepSize(
        queries=queries,
        documents=pool,
        own_queries=config.training.batch_size,
        own_documents=math.ceil(pool / processes),
        query_length=min(config.model.query_max_length or query, limit),
        document_length=min(config.model.doc_max_length or document, limit),
    )


def estimate_memory(
    config: TrainConfig,
    model: ModelSize,
    step: StepSize,
    *,
    documents: int,
    half: bool = False,
    score_memory: int = 256 * MIB,
    blocks: bool = True,
) -> MemoryEstimate:
    """Memory of a step with float32 master weights, on each device.

    Activations: those of all texts of a side if its graph is kept, of one micro-batch if the gradient cache encodes
    it twice (training.micro_batch_size below the number of texts); so with the cache they do not grow with the
    number of documents. What does grow with it: the vectors and their gradients, `documents / processes` rows.

    Args:
        config: the configuration.
        model: the encoder.
        step: sizes of the step.
        documents: documents of the collection, for free vectors.
        half: whether the forward pass is in half precision.
        score_memory: bytes for blocks of the score matrix.
        blocks: whether the loss works block by block; otherwise the whole matrix and its temporaries are held.
    """
    dim = vector_dim(config, model)
    free = free_vectors(config, documents, dim)
    parameters, trainable = model.parameters + free, model.trainable + free
    encoded_documents = 0 if config.model.document_side == "vectors" else step.own_documents
    sides = [(step.own_queries, step.query_length), (encoded_documents, step.document_length)]
    micro = config.training.micro_batch_size
    kept = cached = 0
    for texts, length in sides:
        if micro is None or texts <= micro:
            kept += activations(config, model, texts, length, dim, half=half)
        else:
            cached = max(cached, activations(config, model, micro, length, dim, half=half))
    if config.model.freeze_encoder:
        # No graph: what one layer holds while it runs, an upper bound.
        kept, cached = 0, max(kept, cached) // max(1, model.layers)
    matrix = step.queries * step.own_documents * FLOAT
    masks = 2 if model.layers else 1  # a transformer reads a mask beside the token ids
    tokens = sum(texts * length for texts, length in sides)
    return MemoryEstimate(
        weights=parameters * FLOAT + (parameters * 2 if half and model.layers else 0),
        gradients=trainable * FLOAT,
        optimizer=trainable * MOMENTS.get(config.training.optim.partition("_")[0], 2) * FLOAT,
        activations=kept + cached,
        vectors=(step.queries + step.own_documents) * dim * FLOAT * 2,
        scores=min(2 * matrix, score_memory) if blocks else 4 * matrix,
        inputs=tokens * TOKEN_ID * masks,
    )


def activations(config: TrainConfig, model: ModelSize, texts: int, length: int, dim: int, *, half: bool) -> int:
    """Bytes that the graph of one forward pass over `texts` texts of `length` tokens holds.

    A transformer block holds 34 bytes a token and hidden unit in half precision, twice that in float32 (Korthikanti
    et al. 2022, section 4.1, without the attention matrix, which the fused kernels do not keep); with gradient
    checkpointing only the inputs of the blocks stay. A static encoder keeps one vector a text, three times over
    (mean, norm, result), and its gradient is as large as the table of tokens.
    """
    if not model.layers:
        return texts * dim * FLOAT * 3
    scale = 1 if half else 2
    tokens = texts * length
    block = tokens * 34 * model.width * scale
    if config.training.gradient_checkpointing:
        return tokens * model.width * 2 * scale * model.layers + block
    return block * model.layers
