"""Transformer tower: any Hugging Face encoder or decoder, pooled to one vector a text."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shortlist.errors import ConfigError
from shortlist.retrieval.tokens import Tokens

# The tokenizer's encodings take far more memory than ids: how many texts have them at once.
_SLICE = 512

POOLINGS = ("mean", "cls", "last")

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
}


class Projection(nn.Module):
    """A dense layer over the pooled vector: activation(W x + b), the `Dense` of sentence-transformers."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, activation: str = "identity"):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation {activation!r} is unknown; expected one of {', '.join(ACTIVATIONS)}.")
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation_name = activation
        self.activation = ACTIVATIONS[activation]()

    def forward(self, vectors: Tensor) -> Tensor:
        """`(texts, in_features)` to `(texts, out_features)`."""
        return self.activation(self.linear(vectors))

    def settings(self) -> dict[str, Any]:
        """The arguments that make this layer again."""
        return {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": self.linear.bias is not None,
            "activation": self.activation_name,
        }


class TransformerTower(nn.Module):
    """Backbone, pooling, optional projections, truncation to `dim`, optional L2 norm.

    Args:
        backbone: a Hugging Face model that gives `last_hidden_state`, possibly wrapped by peft.
        tokenizer: its tokenizer; a missing pad token is set to the end token.
        pooling: "mean" over the tokens, "cls" (the first token) or "last" (the last real token).
        projections: dense layers after the pooling.
        normalise: scale the vector to length 1.
        dim: keep the first `dim` numbers (Matryoshka), before normalising.
        lower_case: lower-case the text before tokenisation (old sentence-transformers checkpoints ask for it).
    """

    kind = "transformer"
    by_row = False
    sort_by_length = True

    def __init__(
        self,
        backbone: Any,
        tokenizer: Any,
        *,
        pooling: str = "mean",
        projections: Sequence[Projection] = (),
        normalise: bool = True,
        dim: int | None = None,
        lower_case: bool = False,
    ):
        super().__init__()
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling {pooling!r} is unknown; expected one of {', '.join(POOLINGS)}.")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
        if getattr(backbone.config, "pad_token_id", None) is None:
            backbone.config.pad_token_id = tokenizer.pad_token_id
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.projections = nn.ModuleList(projections)
        self.normalise = normalise
        self.lower_case = lower_case
        self.full_dim: int = projections[-1].linear.out_features if projections else _hidden_size(backbone.config)
        self.dim = self.full_dim if dim is None else dim
        self.longest = _positions(backbone.config)
        # A decoder would keep keys and values for tokens that nobody generates.
        causal = "use_cache" in inspect.signature(_unwrapped(backbone).forward).parameters
        self._forward_options = {"use_cache": False} if causal else {}
        # The length limit is state of the tokenizer: two threads with different limits must take turns.
        self._lock = threading.Lock()
        self._replica: tuple[Any, nn.Module] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_replica")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.Lock()
        self.__dict__["_replica"] = None

    def settings(self) -> dict[str, Any]:
        """What is not a weight but decides the vector."""
        return {
            "kind": self.kind,
            "pooling": self.pooling,
            "projections": [projection.settings() for projection in self.dense()],
            "normalise": self.normalise,
            "dim": self.dim,
            "lower_case": self.lower_case,
        }

    def dense(self) -> list[Projection]:
        """The projections as what they are."""
        return [module for module in self.projections if isinstance(module, Projection)]

    def tokens(self, texts: Sequence[str], *, max_length: int | None) -> Tokens:
        """Token ids of `texts` with the special tokens, at most `max_length` of each (None: all)."""
        rows = [text.lower() for text in texts] if self.lower_case else list(texts)
        encode = self._fast if getattr(self.tokenizer, "is_fast", False) else self._slow
        ids: list[list[int]] = []
        full: list[int] = []
        for start in range(0, len(rows), _SLICE):
            with self._lock:
                some, lengths = encode(rows[start : start + _SLICE], max_length)
            ids += some
            full += lengths
        empty = [position for position, row in enumerate(ids) if not row]
        for position in empty:
            # A decoder's tokenizer makes nothing of an empty text; one pad token stands for it.
            ids[position] = [self.tokenizer.pad_token_id or 0]
        return Tokens.from_lists(ids, [max(1, length) for length in full])

    def _fast(self, texts: list[str], max_length: int | None) -> tuple[list[list[int]], list[int]]:
        encoded = self.tokenizer(
            texts, truncation=max_length is not None, max_length=max_length, padding=False,
            return_attention_mask=False, return_token_type_ids=False, verbose=False,
        )  # fmt: skip
        special = self.tokenizer.num_special_tokens_to_add()
        ids = encoded["input_ids"]
        full = [len(row) for row in ids]
        for position, encoding in enumerate(encoded.encodings):
            full[position] += sum(len(part.ids) - special for part in encoding.overflowing)
        return ids, full

    def _slow(self, texts: list[str], max_length: int | None) -> tuple[list[list[int]], list[int]]:
        ids = self.tokenizer(texts, truncation=False, padding=False, verbose=False)["input_ids"]
        full = [len(row) for row in ids]
        if max_length is not None and max(full) > max_length:
            ids = self.tokenizer(texts, truncation=True, max_length=max_length, padding=False)["input_ids"]
        return ids, full

    def collate(self, tokens: Tokens, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Features of the forward pass: `input_ids` `(texts, longest)`, and `attention_mask` if anything is padded.

        Padding is on the right whatever the tokenizer's side: the vectors do not depend on it.
        """
        ids, mask = tokens.padded(self.tokenizer.pad_token_id or 0)
        features = {"input_ids": torch.from_numpy(ids)}
        if mask is not None:
            features["attention_mask"] = torch.from_numpy(mask)
        return {name: value.to(device) for name, value in features.items()} if device else features

    def tokenize(self, texts: Sequence[str], *, max_length: int | None) -> dict[str, Tensor]:
        """Features of `texts`, on the CPU; `attention_mask` is always there."""
        features = self.collate(self.tokens(texts, max_length=max_length))
        features.setdefault("attention_mask", torch.ones_like(features["input_ids"]))
        return features

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(texts, dim)` in float32, with gradients; either padding side gives the same vectors."""
        mask = features.get("attention_mask")
        ids = features["input_ids"]
        if mask is not None and bool((mask[:, 0] == 0).any()):
            ids, mask = _to_right_padding(ids, mask)
        hidden = self.backbone(input_ids=ids, attention_mask=mask, **self._forward_options).last_hidden_state
        return self.finish(pool(hidden, mask, self.pooling))

    def vectors(self, features: dict[str, Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Vectors `(texts, dim)` in float32 of right-padded features, the backbone computing in `dtype`."""
        mask = features.get("attention_mask")
        backbone = self.inference_module(dtype)
        output = backbone(input_ids=features["input_ids"], attention_mask=mask, **self._forward_options)
        return self.finish(pool(output.last_hidden_state, mask, self.pooling))

    def inference_module(self, dtype: torch.dtype) -> nn.Module:
        """The backbone, or a copy in `dtype` that lasts until a weight changes: training keeps its float32."""
        weights = list(self.backbone.parameters())
        if weights[0].dtype == dtype:
            return self.backbone
        version = (dtype, [(weight.data_ptr(), weight._version) for weight in weights])
        with self._lock:
            if self._replica is None or self._replica[0] != version:
                # Not a submodule: its weights are neither trained nor saved.
                self.__dict__["_replica"] = (version, copy.deepcopy(self.backbone).to(dtype).eval())
            assert self._replica is not None
            return self._replica[1]

    def finish(self, pooled: Tensor) -> Tensor:
        """Pooled float32 vectors `(texts, hidden)` through projections, truncation and norm."""
        # Autocast would take the projections back to half precision.
        with torch.autocast(pooled.device.type, enabled=False):
            vectors = pooled.float()
            for projection in self.projections:
                vectors = projection(vectors)
            vectors = vectors[:, : self.dim]
            return functional.normalize(vectors, dim=-1) if self.normalise else vectors


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Hidden states `(texts, tokens, hidden)` to float32 `(texts, hidden)`.

    `mask` `(texts, tokens)` is True or 1 for real tokens, which begin at position 0 (right padding); None
    means that all are real.
    """
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "last":
        if mask is None:
            return hidden[:, -1].float()
        last = mask.long().sum(dim=1).clamp(min=1) - 1
        return hidden[torch.arange(len(hidden), device=hidden.device), last].float()
    if mask is None:
        return hidden.mean(dim=1, dtype=torch.float32)
    # where, not multiplication: a NaN at a padded position must not reach the mean.
    kept = torch.where(mask.bool()[:, :, None], hidden.float(), 0.0)
    return kept.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1).float()


def _to_right_padding(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of left-padded rows to the right, so that positions count from the first real token."""
    shift = mask.long().argmax(dim=1, keepdim=True)
    position = (torch.arange(ids.shape[1], device=ids.device)[None] + shift) % ids.shape[1]
    return ids.gather(1, position), mask.gather(1, position)


def _unwrapped(backbone: Any) -> nn.Module:
    """The Hugging Face model inside a peft wrapper."""
    return backbone.get_base_model() if hasattr(backbone, "get_base_model") else backbone


def _positions(config: Any) -> int | None:
    """The longest text in tokens that has a position for each, None where there is no such limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    # The RoBERTa family counts positions from the one after the pad token's.
    offset = config.model_type in ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "longformer")
    return positions - config.pad_token_id - 1 if offset else positions


def _hidden_size(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("hidden_size", "d_model", "n_embd", "dim"):
        if isinstance(getattr(text, name, None), int):
            return getattr(text, name)
    raise ConfigError(f"the hidden size of a {config.model_type!r} model is not known.")
