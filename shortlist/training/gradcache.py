"""The gradient cache: activation memory of one micro-batch, whatever the number of texts and whatever the loss.

A loss over many texts needs all their vectors at once, but not all their activations. So the texts are encoded twice:
first without a graph, micro-batch by micro-batch; the loss is taken on the vectors; then each micro-batch is encoded
again with a graph and receives its slice of the gradient of the vectors. The random state of each micro-batch is
recorded and put back, so that dropout makes the same choices both times and the gradient is exact.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (arXiv 2101.06983).
It ends at the vectors, so it knows no loss, and one engine serves all of them and every family of models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Encode = Callable[[Any], Tensor]


def embed(encode: Encode, chunks: Sequence[Any], *, device: torch.device | str | None = None) -> Tensor:
    """Vectors of all `chunks` in one tensor whose gradient reaches the parameters that `encode` uses.

    One chunk is encoded with its graph, which costs nothing twice; several go through the cache. The second encoding
    happens inside `backward` and adds to the `.grad` of the parameters, so `torch.autograd.grad` with respect to
    parameters does not see them.

    Args:
        encode: features of a micro-batch → tensor whose first dimension is the texts, `(texts, …)`; called twice for
            each chunk, it must do the same both times but for random numbers of torch.
        chunks: the features, one element a micro-batch, at least one; the sizes may differ.
        device: where `encode` computes, whose random state is kept beside the CPU's; None: where the features are.

    Returns:
        `(texts, …)`, chunk after chunk.
    """
    if len(chunks) == 1:
        return encode(chunks[0])
    if not torch.is_grad_enabled():
        return torch.cat([encode(chunk) for chunk in chunks])
    where = torch.device(device) if device is not None else _device_of(chunks)
    # The parameters are inside `encode`, out of autograd's sight: this one asks for the gradient in their place.
    handle = torch.zeros((), requires_grad=True)
    return _Cached.apply(handle, encode, list(chunks), where)


class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, encode: Encode, chunks: list[Any], device: torch.device) -> Tensor:
        outputs, ctx.states = [], []
        for chunk in chunks:
            ctx.states.append(_state(device))
            outputs.append(encode(chunk))
        # Half-precision copies of the weights made here have no graph; a later encoding must not find them.
        torch.clear_autocast_cache()
        ctx.encode, ctx.chunks, ctx.device = encode, chunks, device
        ctx.sizes = [len(output) for output in outputs]
        return torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        now = _state(ctx.device)
        try:
            for chunk, state, part in zip(ctx.chunks, ctx.states, gradient.split(ctx.sizes), strict=True):
                with torch.enable_grad(), _as_it_was(state, ctx.device):
                    output = ctx.encode(chunk)
                if output.requires_grad:
                    torch.autograd.backward(output, part.to(output.dtype))
                del output
                torch.clear_autocast_cache()
        finally:
            # Random numbers go on as if nothing had been drawn a second time.
            _set_random(now, ctx.device)
        return None, None, None, None


@dataclass(frozen=True)
class _State:
    """What decides the outcome of an encoding beside weights and features."""

    random: Tensor
    device_random: Tensor | None
    autocast: Mapping[str, Mapping[str, Any]]


def _state(device: torch.device) -> _State:
    module = torch.get_device_module(device) if device.type != "cpu" else None
    autocast = {
        kind: {
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in {"cpu", device.type}
    }
    return _State(torch.get_rng_state(), _device_state(module, device) if module else None, autocast)


def _device_state(module: Any, device: torch.device) -> Tensor:
    # MPS has one generator and takes no device.
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def _set_random(state: _State, device: torch.device) -> None:
    torch.set_rng_state(state.random)
    if state.device_random is not None:
        module = torch.get_device_module(device)
        if device.type == "mps":
            module.set_rng_state(state.device_random)
        else:
            module.set_rng_state(state.device_random, device)


@contextlib.contextmanager
def _as_it_was(state: _State, device: torch.device) -> Iterator[None]:
    """Random states and autocast of the moment when `state` was taken."""
    _set_random(state, device)
    with contextlib.ExitStack() as stack:
        for kind, options in state.autocast.items():
            stack.enter_context(torch.autocast(kind, **options))
        yield


def _device_of(chunks: Sequence[Any]) -> torch.device:
    """Device of the first tensor among the features, else the CPU."""
    for chunk in chunks:
        values = chunk.values() if isinstance(chunk, Mapping) else chunk if isinstance(chunk, list | tuple) else [chunk]
        for value in values:
            if isinstance(value, Tensor):
                return value.device
    return torch.device("cpu")
