"""Static tower: the mean of one vector a token, as fast as tokenisation goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from shortlist.retrieval.bags import mean_of_rows
from shortlist.retrieval.tokens import Tokens
from shortlist.retrieval.words import WordTokenizer


class StaticTower(nn.Module):
    """Mean of static token vectors, then L2 norm: no context, no padding, no length limit of its own.

    A weighted mean is the same thing with the weights folded into the vectors (SIF, Arora et al. 2017).
    A text without a known token is the zero vector.

    Args:
        tokenizer: turns a text into token ids; special tokens are never added.
        embedding: float array `(vocabulary, dim)`.
        normalise: scale the mean to length 1.
        dim: keep the first `dim` numbers of the vector (Matryoshka), before normalising.
    """

    kind = "static"
    by_row = False
    # Nothing is padded, so that order by length saves nothing.
    sort_by_length = False
    longest: int | None = None

    def __init__(self, tokenizer: Tokenizer, embedding: Tensor, *, normalise: bool = True, dim: int | None = None):
        super().__init__()
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self.words = WordTokenizer(tokenizer)
        self.embedding = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.normalise = normalise
        self.full_dim = int(embedding.shape[1])
        self.dim = self.full_dim if dim is None else dim

    def settings(self) -> dict[str, Any]:
        """What is not a weight but decides the vector."""
        return {"kind": self.kind, "normalise": self.normalise, "dim": self.dim}

    def tokens(self, texts: Sequence[str], *, max_length: int | None) -> Tokens:
        """Token ids of `texts`, the first `max_length` of each (None: all)."""
        return self.words(texts).truncate(max_length)

    def collate(self, tokens: Tokens, *, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Features of the forward pass: flat `input_ids` `(tokens,)` and `offsets` `(texts,)`."""
        features = {"input_ids": torch.from_numpy(tokens.ids), "offsets": torch.from_numpy(tokens.starts)}
        return {name: value.to(device) for name, value in features.items()} if device else features

    def tokenize(self, texts: Sequence[str], *, max_length: int | None) -> dict[str, Tensor]:
        """Features of `texts`, on the CPU."""
        return self.collate(self.tokens(texts, max_length=max_length))

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Vectors `(texts, dim)` in float32, with gradients."""
        pooled = mean_of_rows(features["input_ids"], self.embedding.weight, features["offsets"]).float()
        pooled = pooled[:, : self.dim]
        return functional.normalize(pooled, dim=-1) if self.normalise else pooled

    def vectors(self, features: dict[str, Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Vectors `(texts, dim)`; always computed in float32, a sum of rows gains nothing from less."""
        return self(features)

    def inference_module(self, dtype: torch.dtype) -> nn.Module:
        """The module whose layers compute `vectors`."""
        return self


def dequantise(embedding: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Float32 vectors `(rows, dim)` from int8 `embedding` and one float16 `scale` a row, `(rows,)`."""
    return embedding.astype(np.float32) * scale.astype(np.float32)[:, None]
