"""The logs of an evaluation: the names of its metrics, the logs of several weights in one, and the best so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from trainer_kit.errors import UsageError
from trainer_kit.evals.best.named_bests import BestCheckpoints
from trainer_kit.training.trainer_parts.evaluated_weights import EvaluatedWeights


def metric_names(of_sets: Iterable[tuple[str, Sequence[str]]], weights: EvaluatedWeights) -> list[str]:
    """Returns the names of all metrics, nested ones joined by `|`: validation set, weights, metric.

    Args:
      of_sets: Name and metrics of each validation set; a single set has the name "".
      weights: The evaluated weights, of which the main ones add no part to a name.
    """
    return [
        "|".join(filter(None, (name, other, metric)))
        for name, metrics in of_sets
        for other in ("", *weights.others)
        for metric in metrics
    ]


def with_other_weights(logs: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of a validation set, with those of other weights than the main ones under their names.

    Raises:
      UsageError: when a metric has the name of weights.
    """
    if taken := ", ".join(sorted(logs.keys() & others.keys())):
        raise UsageError(
            f"the evaluation reports a metric called {taken}, and ema.evaluate has weights of this name; give the "
            "metric, or the average in ema.more_decays, another name"
        )
    return {**logs, **others}


def exporters(given: Any) -> Iterable[Any]:
    """Returns the exporters of the best checkpoints, each of which has one metric."""
    return given if isinstance(given, BestCheckpoints) else [given]


def add_best(
    logs: dict[str, Any], best: Mapping[str, Any] | None, metric: str, sets: Collection[str], weights: EvaluatedWeights
) -> None:
    """Adds the best value so far of a metric to the logs that hold the metric, as `best_<metric>`.

    Args:
      logs: The logs of an evaluation, which may lack those of some validation sets.
      best: The metrics of the best evaluation, flat; None before the first.
      metric: The metric that decides, with the names of its validation set and weights.
      sets: The names of the validation sets; empty for a single one.
      weights: The evaluated weights.
    """
    of_weights, name = weights.of_metric(metric, sets)
    own, _, name = name.partition("|") if sets else ("", "", name)
    place: Any = logs.get(own) if own else logs
    if of_weights != weights.main and place is not None:
        place = place.get(of_weights)
    if best is not None and place is not None:
        place[f"best_{name}"] = best[metric]
