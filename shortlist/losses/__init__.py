"""Losses on score matrices, as functions and modules on tensors; they know no model and no file.

    loss = DecoupledSoftmax()(scores, positives, valid=None)

Scores `(queries, docs)` are already divided by the temperature; positives are a mask or grades; valid is True = keep.
Losses towards a teacher take its scores in the second place: `KLDivergence()(scores, teacher_scores, valid=None)`.
A loss has the attribute `target`, "positives" or "teacher", that says which.

Losses with `blockwise` true also work from vectors, over pools of a million documents and several processes, in bounded
memory: `pool_loss(loss, queries, documents, rows=..., columns=..., values=..., temperature=...)`.

Which one: DecoupledSoftmax for queries with several positives, InfoNCE when each has one, SoftTopK to aim at a
cut-off, OneVsAllBCE for heads with a vector and a bias per label, MarginMSE or KLDivergence when a stronger model has
scored the documents, ListNet, RankNet or ApproxNDCG for graded lists.
"""

import difflib
import importlib
import inspect
from typing import Any

from torch import nn

from shortlist.errors import ConfigError
from shortlist.losses.base import RankingLoss, check_sampled_positives
from shortlist.losses.contrastive import DecoupledSoftmax, InfoNCE
from shortlist.losses.distillation import KLDivergence, MarginMSE
from shortlist.losses.listwise import ApproxNDCG, ListNet, RankNet
from shortlist.losses.pointwise import OneVsAllBCE
from shortlist.losses.pool import pool_loss
from shortlist.losses.shards import Shard
from shortlist.losses.soft_topk import SoftTopK, soft_top_k

LOSSES: dict[str, type[nn.Module]] = {
    "info_nce": InfoNCE,
    "decoupled_softmax": DecoupledSoftmax,
    "soft_top_k": SoftTopK,
    "one_vs_all_bce": OneVsAllBCE,
    "margin_mse": MarginMSE,
    "kl_divergence": KLDivergence,
    "list_net": ListNet,
    "rank_net": RankNet,
    "approx_ndcg": ApproxNDCG,
}

__all__ = [
    "LOSSES",
    "ApproxNDCG",
    "DecoupledSoftmax",
    "InfoNCE",
    "KLDivergence",
    "ListNet",
    "MarginMSE",
    "OneVsAllBCE",
    "RankNet",
    "RankingLoss",
    "Shard",
    "SoftTopK",
    "build_loss",
    "check_sampled_positives",
    "pool_loss",
    "soft_top_k",
]


def build_loss(name: str, **options: Any) -> nn.Module:
    """Make the loss that a configuration names, with its options.

    Args:
        name: a name of LOSSES, or an import path "package.module:Name" of a class or function that makes a module.
        options: keyword arguments of the loss.

    Raises:
        ConfigError: there is no such loss (the nearest name is given), it has no such option (the valid ones are
            given), or a value is refused.
    """
    factory = _imported(name) if ":" in name else LOSSES.get(name)
    if factory is None:
        raise ConfigError(
            f"there is no loss {name!r}{_nearest(name, LOSSES)}; the losses are {', '.join(LOSSES)}, "
            'or an import path "package.module:Name".'
        )
    parameters = inspect.signature(factory).parameters.values()
    valid = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in valid:
                known = f"its options are {', '.join(valid)}" if valid else "it has no options"
                raise ConfigError(f"loss {name!r} has no option {option!r}{_nearest(option, valid)}; {known}.")
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"loss {name!r} cannot be made from the options {options}: {error}.") from error


def _imported(path: str) -> Any:
    """Return what an import path "package.module:Name" names."""
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f'loss {path!r} cannot be imported: {error}; give "package.module:Name".') from error
    if not callable(found):
        raise ConfigError(f"loss {path!r} is a {type(found).__name__}, not a class or function that makes a loss.")
    return found


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
