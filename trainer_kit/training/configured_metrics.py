"""Makes the metrics that a config names: `trainer.metrics: [{type: keras, keras: {metric: Mean}}]`."""

from __future__ import annotations

from typing import Any

import keras

from trainer_kit.config.schema.metrics import KerasMetricConfig, MetricConfig
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.training.metrics import check_metric


def configured_metrics(config: Any, wanted: bool) -> list[Any]:
    """Returns new metrics for the entries of `trainer.metrics`; in strategy scope.

    Args:
      config: The experiment's config.
      wanted: Whether metrics are needed; if not, there are none.

    Raises:
      UsageError: when a metric cannot be made.
    """
    found = []
    for place, section in enumerate(getattr(config.trainer, "metrics", ()) if wanted else ()):
        registered = section.type in MetricConfig.registry
        build = MetricConfig.registry.lookup(str(section.type)).build if registered else _keras_metric
        metric = build(section.get())
        check_metric(metric, f"trainer.metrics[{place}]: {section.type} built")
        found.append(metric)
    return found


def _keras_metric(config: KerasMetricConfig) -> Any:
    kind = getattr(keras.metrics, config.metric, None)
    if not (isinstance(kind, type) and issubclass(kind, keras.metrics.Metric)):
        known = [name for name in dir(keras.metrics) if isinstance(getattr(keras.metrics, name), type)]
        raise UsageError(f"trainer.metrics: keras.metrics has no {config.metric!r}; {suggestion(config.metric, known)}")
    try:
        return kind(**config.args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"trainer.metrics: keras.metrics.{config.metric} refuses its args: {error}") from error
