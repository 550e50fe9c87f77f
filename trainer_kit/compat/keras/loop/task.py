"""LoopTask: the functions of a loop by hand as a task, and its Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.keras.loop.steps import LoopSteps
from trainer_kit.compat.keras.task import KerasTask
from trainer_kit.compat.keras.task_config import KerasTaskConfig
from trainer_kit.compat.keras.trainer import KerasTrainer
from trainer_kit.config.experiments import register_task
from trainer_kit.config.schema.base import configclass
from trainer_kit.training.metrics import MetricSet


@configclass
class LoopTaskConfig(KerasTaskConfig):
    """The section `task` of a loop by hand."""


class LoopTask(KerasTask):
    """Trains with the functions of a loop by hand.

    Args:
      params: The task's config.
      logging_dir: The folder of the run's files.
      steps: The functions; they are traced already.
      data: A function that returns the data of a DataConfig.
    """

    def __init__(
        self, params: Any, logging_dir: str | None = None, *, steps: LoopSteps, data: Callable[[Any], Any]
    ) -> None:
        super().__init__(params, logging_dir, build=lambda: steps.model, data=data)
        self.steps = steps

    def prepare_training(self, model: Any) -> Any:
        """Returns the optimizer, or the dict of optimizers. Called in strategy scope."""
        return self.steps.optimizer

    def prepare_evaluation(self, model: Any) -> None:
        """Does nothing: the functions are traced already."""

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Runs the caller's train_step, in graph."""
        del model, optimizer, metrics
        return self.steps.logs("train_step", inputs)

    @tf.autograph.experimental.do_not_convert
    def validation_step(self, inputs: Any, model: Any, metrics: Sequence[Any] | None = None) -> dict[str, Any]:
        """Runs the caller's test_step, in graph."""
        del model, metrics
        return self.steps.logs("test_step", inputs)


class LoopMetrics(MetricSet):
    """The mean loss of an epoch and the metrics of the caller. Created in the scope of the strategy.

    A batch counts as much as it has examples. A metric of the caller that is called "loss" replaces the mean loss.
    """

    @tf.autograph.experimental.do_not_convert
    def update_with_step(self, task: Any, logs: Any, inputs: Any, share: Any = None) -> None:
        """Adds the loss and the other scalars of one training step; runs in graph."""
        self.update_loss(logs[task.loss], inputs)
        self.update_step_values(task, logs, inputs)

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns all results by name; called in cross-replica context."""
        found = super().results()
        return {**found, self.loss.name: found.pop("loss")} if "loss" in found else found


class LoopTrainer(KerasTrainer):
    """Trains a LoopTask; see KerasTrainer."""

    def _training_metrics(self, config: Any, task: Any, model: Any) -> Any:
        return LoopMetrics("training_loss", task.steps.metrics)

    def _evaluation_metrics(self, config: Any, task: Any, model: Any, wanted: bool) -> Any:
        return LoopMetrics("validation_loss", task.steps.val_metrics)


register_task(LoopTaskConfig, LoopTask, trainer="trainer_kit.compat.keras.loop.task:LoopTrainer")
