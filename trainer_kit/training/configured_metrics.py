"""Makes the metrics that a config names: `trainer.metrics: [{type: keras, keras: {metric: Mean}}]`."""

from __future__ import annotations

from typing import Any

import keras

from trainer_kit.config.schema.metrics import KerasMetricConfig, MetricConfig
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.training.metrics import check_metric


def configured_metrics(config: Any, wanted: bool) -> list[Any]:
    """Returns new metrics for the entries of `trainer.metrics` that name no tensor; called in strategy scope.

    Args:
      config: The experiment's config.
      wanted: Whether metrics are needed; if not, there are none.

    Raises:
      UsageError: when a metric cannot be made.
    """
    sections = enumerate(getattr(config.trainer, "metrics", ()) if wanted else ())
    return [_built(place, section) for place, section in sections if not section.tensor]


def tensor_metrics(config: Any) -> list[tuple[Any, str, str]]:
    """Returns (metric, tensor name, field of the config) for the entries of `trainer.metrics` that name a tensor.

    The metrics are new; called in strategy scope.

    Args:
      config: The experiment's config.

    Raises:
      UsageError: when a metric cannot be made.
    """
    sections = enumerate(getattr(config.trainer, "metrics", ()))
    return [
        (_built(place, section), section.tensor, f"trainer.metrics[{place}]")
        for place, section in sections
        if section.tensor
    ]


def _built(place: int, section: MetricConfig) -> Any:
    registered = section.type in MetricConfig.registry
    build = MetricConfig.registry.lookup(str(section.type)).build if registered else _keras_metric
    metric = build(section.get())
    check_metric(metric, f"trainer.metrics[{place}]: {section.type} built")
    return metric


def _keras_metric(config: KerasMetricConfig) -> Any:
    kind = getattr(keras.metrics, config.metric, None)
    if not (isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)):
        known = [name for name in dir(keras.metrics) if isinstance(getattr(keras.metrics, name), type)]
        raise UsageError(f"trainer.metrics: keras.metrics has no {config.metric!r}; {suggestion(config.metric, known)}")
    try:
        return kind(**config.args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"trainer.metrics: keras.metrics.{config.metric} refuses its args: {error}") from error
