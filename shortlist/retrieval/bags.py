"""The mean of embedding rows a text, with a fast gradient on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def mean_of_rows(ids: Tensor, embedding: Tensor, offsets: Tensor) -> Tensor:
    """Mean of the rows `ids[offsets[i]:offsets[i + 1]]` of `embedding`, `(texts, dim)`; zeros for an empty text.

    The same as `torch.nn.functional.embedding_bag(…, mode="mean")`. On the CPU its gradient is a sum of bags as well,
    one a token, over the transposed lists: 5 to 10 times faster than torch's own, which adds row after row.
    """
    if embedding.requires_grad and torch.is_grad_enabled() and embedding.device.type == "cpu" and len(ids):
        return _MeanOfRows.apply(ids, embedding, offsets)
    return functional.embedding_bag(ids, embedding, offsets, mode="mean")


class _MeanOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, embedding: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(ids, offsets)
        ctx.vocabulary = len(embedding)
        return functional.embedding_bag(ids, embedding, offsets, mode="mean")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ids, offsets = ctx.saved_tensors
        bounds = np.append(offsets.numpy(), len(ids))
        lengths = torch.from_numpy(np.diff(bounds)).clamp(min=1)
        # texts × tokens in rows; its transpose lists for every token the texts that hold it (a counting sort).
        shape = (len(offsets), ctx.vocabulary)
        by_token = csr_matrix((np.ones(len(ids), np.float32), ids.numpy(), bounds), shape=shape).tocsc()
        texts = torch.from_numpy(by_token.indices.astype(np.int64, copy=False))
        starts = torch.from_numpy(by_token.indptr[:-1].astype(np.int64, copy=False))
        scaled = (gradient / lengths[:, None].to(gradient.dtype)).contiguous()
        return None, functional.embedding_bag(texts, scaled, starts, mode="sum"), None
