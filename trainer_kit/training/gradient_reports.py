"""GradientReports: the norms of gradients in the logs of training loops.

The setting is trainer.report_gradient_norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradient_processing import GradientProcessing
from trainer_kit.optimizers.gradients import Gradient, global_norm
from trainer_kit.optimizers.learning_rate import unwrap_optimizer
from trainer_kit.training.metric_set import MetricSet, StepMean
from trainer_kit.typing import Optimizers, TaskLike

if TYPE_CHECKING:
    from trainer_kit.config.schema.experiment import TrainerConfig
    from trainer_kit.config.schema.optimization import OptimizationConfig

_NAME = "gradient_norm"
_FIELD = "trainer.report_gradient_norm"
# The key of the norms in the results of a loop.
_KEY = "trainer_kit/gradient_norm"
_ADVICE = (
    "the training step applies gradients in another way; "
    "call trainer_kit.apply_gradients(optimizer, ...)"
)


class GradientNorms:
    """Updates a mean with the global norm of the gradients of one optimizer.

    It is the attribute `gradient_norms` of the optimizer. See `optimizers.gradients`. The mean
    itself would become a part of the optimizer in checkpoints.

    Args:
      mean: The mean of the norms over the updates of a loop.
    """

    def __init__(self, mean: StepMean) -> None:
        self._mean = mean

    @tf.autograph.experimental.do_not_convert
    def update(self, gradients: Sequence[Gradient]) -> None:
        """Records the norm of the gradients of an update, summed over replicas and unscaled.

        Runs in graph, on a replica.
        """
        norm = global_norm(gradients)
        self._mean.update_state(norm)


class GradientReports:
    """Reports the gradient norms of each optimizer.

    It also checks that the gradient processors of the config run. Created in strategy scope.

    Args:
      options: The section trainer of the config.
      optimizer: The built optimizer, a dict of optimizers by name, or None.
      global_step: The global step, an int64 scalar variable.
      metrics: The training metrics, to which the norms are added.
      task: The task that created the optimizers.

    Raises:
      UsageError: when a metric has the name of the report, or no optimizer has the processors of
        its section.
    """

    def __init__(
        self,
        options: TrainerConfig,
        optimizer: Optimizers | None,
        global_step: tf.Variable,
        metrics: MetricSet,
        task: TaskLike,
    ) -> None:
        # A single optimizer has the name "".
        by_name = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        optimizers = {
            name: unwrap_optimizer(outer) for name, outer in by_name.items() if outer is not None
        }
        self._is_traced: bool = getattr(options, "train_tf_function", True)

        self._means: dict[str, StepMean] = {}
        reports_norms = getattr(options, "report_gradient_norm", False)
        if optimizers and reports_norms:
            metrics.reserve(_NAME, _FIELD)
            for name, inner in optimizers.items():
                mean = StepMean(f"{_KEY}/{name}")
                metrics.add_metric(mean, _FIELD)
                inner.gradient_norms = GradientNorms(mean)
                self._means[name] = mean

        self._processings: dict[str, GradientProcessing] = {}
        for name, inner in optimizers.items():
            if processing := getattr(inner, "gradient_processing", None):
                processing.global_step = global_step
                processing.optimizer_name = name
                self._processings[name] = processing

        # The sections of optimizers, each with the names of the optimizers that it configures.
        named_sections: Mapping[str, OptimizationConfig] = (
            getattr(options, "optimizers", None) or {}
        )
        sections: dict[str, tuple[OptimizationConfig | None, list[str]]] = {}
        for name, section in named_sections.items():
            sections[f"optimizers.{name}"] = (section, [name])
        if not sections:
            common_section = getattr(options, "optimizer_config", None)
            sections["optimizer_config"] = (common_section, list(optimizers))

        # The processors that each field of the config asks for.
        self._required: dict[str, list[GradientProcessing]] = {}
        for path, (optimizer_section, names) in sections.items():
            processors = getattr(optimizer_section, "gradient_processors", ())
            if not optimizers or not processors:
                continue

            field = f"trainer.{path}.gradient_processors"
            processings = [self._processings[name] for name in names if name in self._processings]
            self._required[field] = processings
            if not processings:
                raise UsageError(
                    f"{field}: create_optimizer of {type(task).__name__} makes an optimizer "
                    "without them; call super().create_optimizer, or remove the processors"
                )

    def update_results(self, results: dict[str, Any]) -> None:
        """Moves the mean norms in the results of a loop to their reported name.

        Leaves out optimizers without an update. Runs eagerly, on the host.

        Args:
          results: The results of a loop, NumPy values.
        """
        norms = {}
        for name, mean in self._means.items():
            norm = results.pop(mean.name)
            # The count is read only if there may be no update.
            if norm != 0 or mean.count > 0:
                norms[name] = norm
        if norms:
            results[_NAME] = norms.get("", norms)

    def check_first_step(self) -> None:
        """Checks, after the first step, that it has recorded norms and run processors.

        Only what the config asks for counts. Runs eagerly, on the host.

        Raises:
          UsageError: when the step does not call `apply_gradients`.
        """
        are_updated = [mean.is_updated for mean in self._means.values()]
        if self._means and not any(are_updated):
            raise UsageError(f"{_FIELD}: {_ADVICE}, or unset it")

        # An eager step traces nothing: in the first step of its period an optimizer does not
        # process gradients yet.
        is_traced = self._is_traced and not tf.config.functions_run_eagerly()
        for field, processings in self._required.items():
            expected = processings if is_traced else list(self._processings.values())
            are_used = [processing.is_used for processing in expected]
            is_sound = all(are_used) if is_traced else any(are_used)
            if not is_sound:
                raise UsageError(f"{field}: {_ADVICE}, or remove the processors")
