"""GradientReports: the norms of gradients in the logs of training loops (trainer.report_gradient_norm)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradient_processors import GradientProcessing
from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.learning_rate import innermost
from trainer_kit.training.metrics import MetricSet

_NAME = "gradient_norm"
_FIELD = "trainer.report_gradient_norm"
_KEY = "trainer_kit/gradient_norms"  # of the results of a loop
_ADVICE = "the training step applies gradients in another way; call trainer_kit.apply_gradients(optimizer, ...)"


class GradientNorms:
    """The mean global norm of the gradients of one optimizer in a loop. Created in the scope of the strategy.

    It is the attribute `gradient_norms` of the optimizer; see `optimizers.gradients`.

    Attributes:
      is_used: Whether a step has been traced that records norms.
      variable: The sum of the norms, and their number.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.variable = tf.Variable(  # each replica writes it for itself, and always with the same value
            tf.zeros(2),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            name="gradient_norms",
        )

    @tf.autograph.experimental.do_not_convert
    def update(self, gradients: Sequence[Gradient]) -> None:
        """Records the norm of the gradients of an update, summed over replicas and unscaled; in a replica."""
        self.is_used = True
        values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
        norm = tf.linalg.global_norm([tf.cast(value, tf.float32) for value in values])
        self.variable.assign_add(tf.stack([norm, 1.0]))


class GradientReports:
    """Reports the gradient norms of each optimizer, and checks that the gradient processors of the config run.

    Created in the scope of the strategy. It has the methods of a part of a MetricSet.

    Args:
      options: The section trainer of the config.
      optimizer: The built optimizer, a dict of optimizers by name, or None.
      global_step: The global step, an int64 scalar variable.
      metrics: The set of the training metrics, which takes this as a part if there is something to report.

    Raises:
      UsageError: when a metric has the name of the report.
    """

    def __init__(self, options: Any, optimizer: Any, global_step: tf.Variable, metrics: MetricSet) -> None:
        self._options = options
        by_name = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}  # "" for a single one
        optimizers = {name: innermost(one) for name, one in by_name.items() if one is not None}
        self._norms: dict[str, GradientNorms] = {}
        if optimizers and getattr(options, "report_gradient_norm", False):
            self._norms = {name: GradientNorms() for name in optimizers}
            metrics.add_part(self)

        self._processings: dict[str, GradientProcessing] = {}
        for name, inner in optimizers.items():
            if name in self._norms:
                inner.gradient_norms = self._norms[name]
            if processing := getattr(inner, "gradient_processing", None):
                processing.global_step = global_step
                processing.optimizer_name = name
                self._processings[name] = processing

    @property
    def names(self) -> dict[str, str]:
        """The name of the report, with the field of the config that asks for it."""
        return {_NAME: _FIELD}

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the norms, which belong to a loop."""
        return [norms.variable for norms in self._norms.values()]

    def reset(self) -> None:
        """Begins a loop; runs eagerly or in graph, in cross-replica context."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    def results(self) -> dict[str, Any]:
        """Returns an entry for the results of a loop, which `read` takes; runs in graph, in cross-replica context."""
        sums = {name: tf.unstack(tf.convert_to_tensor(norms.variable)) for name, norms in self._norms.items()}
        return {_KEY: {name: {"sum": total, "updates": updates} for name, (total, updates) in sums.items()}}

    def read(self, results: dict[str, Any]) -> None:
        """Replaces the entry in the results of a loop by the mean norms; leaves out optimizers without an update.

        Args:
          results: The results of a loop, NumPy values.
        """
        sums = results.pop(_KEY, {})
        means = {name: one["sum"] / one["updates"] for name, one in sums.items() if one["updates"]}
        if means:
            results[_NAME] = means.get("", means)

    def check_used(self, task: Any) -> None:
        """Checks, after the first step, that it has recorded norms and run processors as the config asks.

        Args:
          task: The task that made the optimizers.

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
            if problem := self._problem_of_processors(processings, task):
                raise UsageError(f"trainer.{path}.gradient_processors: {problem}, or remove the processors")

    def _problem_of_processors(self, processings: Sequence[GradientProcessing], task: Any) -> str:
        """Returns why the processors of an optimizer did not run in the first step; "" if they did."""
        if not processings:
            return (
                f"create_optimizer of {type(task).__name__} makes an optimizer without them; call "
                "super().create_optimizer"
            )
        # An eager step traces nothing: in the first step of its period an optimizer does not process gradients yet.
        if not getattr(self._options, "train_tf_function", True) or tf.config.functions_run_eagerly():
            are_used = any(processing.is_used for processing in self._processings.values())
        else:
            are_used = all(processing.is_used for processing in processings)
        return "" if are_used else _ADVICE
