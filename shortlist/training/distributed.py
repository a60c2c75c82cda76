"""Several processes as one: the step they make together is the step that one process with the whole batch makes.

Every rank builds the same global batch, encodes its contiguous part of the queries and of the pool, and takes its part
of the loss (shortlist.losses.pool_loss). Gradients are summed, never averaged, so that the gradient of a step is that
of one process with a batch of `batch_size` times the number of processes. Averaging, as DistributedDataParallel does,
would shrink it by that number, which Adam hides and SGD does not. The learning rate is not multiplied by the number of
processes, as the code released with DEXML does: a larger batch may want a larger rate, but that is for the user to say.

Rank 0 alone reads and writes the output; `on_main` lets the others wait for it, and fail with it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shortlist.errors import ConfigError, ShortlistError

Result = TypeVar("Result")

# Gradients smaller than this are sent together, up to as many numbers.
BUCKET = 1 << 22

# Rank 0 may mine or evaluate for hours. A rank that dies is noticed by the launcher, not by this limit.
TIMEOUT = datetime.timedelta(days=2)


def rank() -> int:
    """Number of this process, 0 without others."""
    return dist.get_rank() if _started() else 0


def world() -> int:
    """Number of processes, 1 without others."""
    return dist.get_world_size() if _started() else 1


def is_main() -> bool:
    """Whether this process writes."""
    return rank() == 0


def start() -> bool:
    """Join the processes that `torchrun` or `accelerate launch` started; whether there is now something to leave.

    Raises:
        ConfigError: FSDP or DeepSpeed were asked for.
    """
    for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(variable, "false").lower() in ("true", "1", "yes"):
            raise ConfigError(
                f"{name} is switched on, which shortlist train does not support: every process needs the whole model "
                "to encode its part of queries and documents. Launch with torchrun, or accelerate launch --multi_gpu; "
                "training.micro_batch_size and training.score_memory bound the memory."
            )
    if _started() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return False
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # The CPU's part is for `on_main`, whose waiting must not keep a GPU busy.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    return True


def stop() -> None:
    """Leave the other processes, so that none waits for this one."""
    if _started():
        dist.destroy_process_group()


def lost_another(error: BaseException) -> bool:
    """Whether an error says that another process is gone: a broken connection, not what this process did."""
    return isinstance(error, dist.DistNetworkError) or "gloo/transport" in str(error)


def on_main(work: Callable[[], Result]) -> Result:
    """Do `work` on rank 0 alone; every rank returns what it returned there, or raises what it raised there.

    Results and errors travel by pickle between the processes of one run; nothing of it reaches a disk.
    """
    if world() == 1:
        return work()
    box: list[Any] = [None, None]
    error: BaseException | None = None
    if is_main():
        try:
            box[0] = work()
        except Exception as raised:
            error = raised
            box[1] = raised if isinstance(raised, ShortlistError) else _Failed(f"{type(raised).__name__}: {raised}")
    dist.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    if box[1] is not None:
        raise box[1]
    result: Result = box[0]
    return result


def all_or_none(work: Callable[[], Result]) -> Result:
    """Do `work` on every rank; if it fails on any, all raise, so that none waits for one that is gone."""
    if world() == 1:
        return work()
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    messages = gather_objects(f"{type(error).__name__}: {error}" if error else None)
    if error is not None:
        raise error
    for number, message in enumerate(messages):
        if message is not None:
            raise _Failed(f"process {number} failed: {message}")
    return result


def main_first(work: Callable[[], Result]) -> Result:
    """Do `work` on every rank, on rank 0 before the others: what it leaves in a cache they find there."""
    done: list[Result] = []

    def first() -> None:
        done.append(work())

    on_main(first)
    return all_or_none(lambda: done[0] if done else work())


def gather_objects(value: Result) -> list[Result]:
    """The value of each rank, in order, on every rank."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def gather_rows(local: Tensor, counts: Sequence[int], *, reduce: bool) -> Tensor:
    """Rows of all ranks one after the other, `(sum of counts, …)`, differentiable to this rank's own.

    Args:
        local: this rank's rows, `(counts[rank], …)`.
        counts: rows of each rank, the same list everywhere; may hold 0.
        reduce: how the gradient of the gathered rows becomes that of one's own. True: summed over the ranks first,
            for a loss of which every rank has a part. False: taken as it is, for a loss that every rank has whole.
    """
    if world() == 1:
        return local
    if torch.is_grad_enabled() and not local.requires_grad:
        # The sum in the backward pass needs every rank, also one that has nothing to train with.
        local = local.detach().requires_grad_()
    gathered: Tensor = _Gather.apply(local, list(counts), reduce)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, counts: list[int], reduce: bool) -> Tensor:
        own = rank()
        ctx.start, ctx.count, ctx.reduce = sum(counts[:own]), counts[own], reduce
        # Collectives want equal sizes: parts are padded to the largest and cut afterwards.
        padded = local.new_zeros((max(counts), *local.shape[1:]))
        padded[: len(local)] = local
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded)
        return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.reduce:
            gradient = gradient.contiguous().clone()
            dist.all_reduce(gradient)
        return gradient[ctx.start : ctx.start + ctx.count].contiguous(), None, None


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradient of each parameter by the sum over the ranks.

    A parameter without a gradient on any rank keeps none, so that the optimiser passes it over as in one process.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if world() == 1 or not trained:
        return
    present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    present = present.to(trained[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    gradients = []
    for parameter, there in zip(trained, present.tolist(), strict=True):
        if there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0])
            continue
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def same_weights(module: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    if world() > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients in order, small neighbours of one type together."""
    buckets: list[list[Tensor]] = []
    filled = 0
    for gradient in gradients:
        fits = buckets and buckets[-1][0].dtype == gradient.dtype and filled + gradient.numel() <= BUCKET
        if fits:
            buckets[-1].append(gradient)
        else:
            buckets.append([gradient])
            filled = 0
        filled += gradient.numel()
    return buckets


class _Failed(ShortlistError):
    """Another process failed with an error of no class of ours."""


def _started() -> bool:
    return dist.is_available() and dist.is_initialized()
