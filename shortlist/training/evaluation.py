"""Selection while training: a real search over a held-out part, measured as every run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shortlist.errors import ConfigError
from shortlist.metrics import evaluate, parse_measure
from shortlist.types import Qrels, Run


@dataclass(frozen=True)
class DevSet:
    """Held-out queries, and how to search for them with the encoder as it is now.

    `search` encodes the documents and the queries and ranks; training does not know how. `metric` decides which
    checkpoint is the best one, `measures` are reported beside it; `options` go to shortlist.metrics.evaluate.
    """

    qrels: Qrels
    search: Callable[[], Run]
    metric: str
    measures: Sequence[str] = ()
    description: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def measure(self) -> dict[str, float]:
        """Search and measure: measure name → mean over the held-out queries, the deciding metric first.

        Raises:
            ConfigError: the metric is not among what was measured; the message lists that.
        """
        names = list(dict.fromkeys([self.metric, *self.measures]))
        result = evaluate(self.qrels, self.search(), names, **self.options)
        if self.metric not in result.mean:
            raise ConfigError(
                f"training.metric_for_best_model is {self.metric!r}, which the evaluation does not give; it gives "
                f"{', '.join(result.mean)}."
            )
        return {name: float(result.mean[name]) for name in names if name in result.mean}


def metric_name(name: str) -> str:
    """The canonical measure name of `training.metric_for_best_model`; ConfigError names the nearest one."""
    try:
        return parse_measure(name)
    except ConfigError as error:
        raise ConfigError(f"training.metric_for_best_model: {error}") from None
