"""GradientReports: the norms of gradients in the logs of training loops (trainer.report_gradient_norm)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradient_processors import GradientProcessing
from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.learning_rate import innermost
from trainer_kit.training.metrics import MetricSet

_NAME = "gradient_norm"
_FIELD = "trainer.report_gradient_norm"
_KEY = "trainer_kit/gradient_norm"  # of the results of a loop
_ADVICE = "the training step applies gradients in another way; call trainer_kit.apply_gradients(optimizer, ...)"


class GradientNorms:
    """Reports the global norm of the gradients of one optimizer as a scalar of its steps.

    It is the attribute `gradient_norms` of the optimizer; see `optimizers.gradients`.

    Args:
      metrics: The training metrics, to which the norms are added.
      key: The name of the scalar.

    Attributes:
      key: The argument of this name.
      is_used: Whether a step has been traced that records norms.
    """

    def __init__(self, metrics: MetricSet, key: str) -> None:
        self._metrics = metrics
        self.key = key
        self.is_used = False

    @tf.autograph.experimental.do_not_convert
    def update(self, gradients: Sequence[Gradient]) -> None:
        """Records the norm of the gradients of an update, summed over replicas and unscaled; in a replica."""
        self.is_used = True
        values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
        norm = tf.linalg.global_norm([tf.cast(value, tf.float32) for value in values])
        self._metrics.add_scalars({self.key: norm})


class GradientReports:
    """Reports the gradient norms of each optimizer, and checks that the gradient processors of the config run.

    Created in the scope of the strategy.

    Args:
      options: The section trainer of the config.
      optimizer: The built optimizer, a dict of optimizers by name, or None.
      global_step: The global step, an int64 scalar variable.
      metrics: The training metrics, to which the norms are added.
      task: The task that made the optimizers.

    Raises:
      UsageError: when a metric has the name of the report.
    """

    def __init__(self, options: Any, optimizer: Any, global_step: tf.Variable, metrics: MetricSet, task: Any) -> None:
        self._options = options
        self._task_name = type(task).__name__
        self._metrics = metrics
        by_name = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}  # "" for a single one
        optimizers = {name: innermost(outer) for name, outer in by_name.items() if outer is not None}
        reports_norms = bool(optimizers) and getattr(options, "report_gradient_norm", False)
        if reports_norms:
            metrics.reserve(_NAME, _FIELD)

        self._norms: dict[str, GradientNorms] = {}
        self._processings: dict[str, GradientProcessing] = {}
        for name, inner in optimizers.items():
            if reports_norms:
                inner.gradient_norms = self._norms[name] = GradientNorms(metrics, f"{_KEY}/{name}")
            if processing := getattr(inner, "gradient_processing", None):
                processing.global_step = global_step
                processing.optimizer_name = name
                self._processings[name] = processing

    def read(self, results: dict[str, Any]) -> None:
        """Gives the mean norms in the results of a loop their place; leaves out optimizers without an update.

        Args:
          results: The results of a loop, NumPy values.
        """
        means = {}
        for name, norms in self._norms.items():
            mean = results.pop(norms.key, np.nan)
            if not np.isnan(mean) or self._metrics.was_added(norms.key):
                means[name] = mean
        if means:
            results[_NAME] = means.get("", means)

    def first_step_done(self) -> None:
        """Checks, after the first step, that it has recorded norms and run processors as the config asks.

        Raises:
          UsageError: when the step does not call `apply_gradients`, or an optimizer has not the processors of its
            section.
        """
        if self._norms and not any(norms.is_used for norms in self._norms.values()):
            raise UsageError(f"{_FIELD}: {_ADVICE}, or unset it")
        several = getattr(self._options, "optimizers", None) or {}
        sections = {f"optimizers.{name}": (section, [name]) for name, section in several.items()}
        if not sections:
            sections["optimizer_config"] = (getattr(self._options, "optimizer_config", None), list(self._processings))
        for path, (section, names) in sections.items():
            if not getattr(section, "gradient_processors", ()):
                continue
            processings = [self._processings[name] for name in names if name in self._processings]
            if problem := self._problem_of_processors(processings):
                raise UsageError(f"trainer.{path}.gradient_processors: {problem}, or remove the processors")

    def _problem_of_processors(self, processings: Sequence[GradientProcessing]) -> str:
        """Returns why the processors of an optimizer did not run in the first step; "" if they did."""
        if not processings:
            return (
                f"create_optimizer of {self._task_name} makes an optimizer without them; call super().create_optimizer"
            )
        # An eager step traces nothing: in the first step of its period an optimizer does not process gradients yet.
        if not getattr(self._options, "train_tf_function", True) or tf.config.functions_run_eagerly():
            are_used = any(processing.is_used for processing in self._processings.values())
        else:
            are_used = all(processing.is_used for processing in processings)
        return "" if are_used else _ADVICE
