"""The loss that a configuration asks for, and whether it can do what the data and training settings want of it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from shortlist.errors import ConfigError, DataError
from shortlist.losses import LOSSES, SoftTopK, build_loss, check_sampled_positives
from shortlist.settings import TrainConfig


def training_loss(config: TrainConfig) -> nn.Module:
    """Make the loss of `config`; positives with values (grades, inverse propensities) weigh by them where it can.

    Grades weigh in proportion within a query; propensity weights keep their scale, so that a query of rare labels
    counts more. Options that the configuration gives itself win. Sampled positives are drawn in proportion to their
    grades, which then must not weigh again.

    Raises:
        ConfigError: no such loss or option, or a setting that this loss cannot follow; the key is named.
    """
    name, options = config.loss.name, dict(config.loss.options)
    accepted = inspect.signature(LOSSES[name]).parameters if name in LOSSES else {}
    sampled = config.training.sample_positives is not None
    if config.data.propensity_weights:
        if sampled:
            raise ConfigError(
                "data.propensity_weights and training.sample_positives exclude each other: positives are drawn in "
                "proportion to their grades alone. Leave one of them out."
            )
        if name in LOSSES and "weight_by_grade" not in accepted:
            raise ConfigError(
                f"data.propensity_weights: loss.name is {name!r}, which weighs no positives; use one of "
                f"{', '.join(key for key, loss in LOSSES.items() if _weighs(loss))}."
            )
        options = _defaults(accepted, weight_by_grade=True, normalise_weights=False) | options
    elif config.data.graded and not sampled:
        options = _defaults(accepted, weight_by_grade=True) | options
    try:
        loss = build_loss(name, **options)
    except ConfigError as error:
        raise ConfigError(f"loss: {error}") from None
    if sampled:
        check_sampled_positives(loss)
    return loss


def check_pool(loss: nn.Module, documents: int) -> None:
    """Refuse a corpus of `documents` distinct texts that leaves the loss nothing to tell apart.

    Raises:
        DataError: there is one document, which is the answer to everything.
        ConfigError: k of soft_top_k is all documents or more, so that each is certain and the loss always 0.
    """
    if documents < 2:
        raise DataError(
            f"the corpus has {documents} document with a text of its own, so every query has the same answer and there "
            "is nothing to learn; look at it with `shortlist data info`."
        )
    mass = getattr(loss, "k", None) if isinstance(loss, SoftTopK) else None
    if isinstance(mass, float) and mass >= documents:
        raise ConfigError(
            f"loss.k is {mass:g} and the corpus has {documents} documents with a text of their own: soft_top_k would "
            "give each of them the probability 1, and nothing could be learned. Choose a k well below that, such as 5, "
            'or "num_pos".'
        )


def _defaults(accepted: Any, **options: bool) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in accepted}


def _weighs(loss: type[nn.Module]) -> bool:
    return "weight_by_grade" in inspect.signature(loss).parameters
