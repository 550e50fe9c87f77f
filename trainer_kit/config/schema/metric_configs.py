"""Configs of the metrics that a config adds to those of a task, and of tensor summaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig


@configclass
class KerasMetricConfig(Config):
    """A metric of Keras.

    Attributes:
      metric: The name of a class in keras.metrics, such as SparseTopKCategoricalAccuracy.
      args: The arguments that the class is called with.
    """

    metric: str
    args: dict[str, Any] = Field(default_factory=dict)


@configclass
class MetricConfig(OpenOneOfConfig):
    """Which metric. `trainer_kit.register_metric` adds one.

    Attributes:
      type: Which of the metrics below, or of those that are registered, is used.
      keras: A metric of Keras, and its arguments.
      tensor: The name of a tensor, of trainer_kit.expose or of a layer, that training and
        evaluation steps update the metric with. Empty: the task's process_metrics updates it with
        labels and outputs.
    """

    registry: ClassVar[Registry[Branch]] = Registry("metric")

    type: str | None = None
    keras: KerasMetricConfig | None = None
    tensor: str = ""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that a metric is chosen."""
        if self.type is None:
            yield "type", f"is needed; give one of {', '.join(self.branches())}"

    def get_active_fields(self) -> list[str]:
        return [*super().get_active_fields(), *(["tensor"] if self.tensor else [])]


@configclass
class SummaryConfig(Config):
    """A summary of a tensor.

    It has the value of the last step of a training loop or of an evaluation.

    Attributes:
      tensor: The name of the tensor, of trainer_kit.expose or of a layer.
      type: What is written: `scalar` reports the tensor with the metrics of the loop; `histogram`
        and `image` go to TensorBoard. An image is a tensor [batch, height, width, channels], of
        which the first three are shown.
      of: Which steps expose the tensor: those of training, of evaluation, or both.
    """

    tensor: str
    type: Literal["scalar", "histogram", "image"] = "scalar"
    of: Literal["training", "evaluation", "both"] = "training"
