"""GradientReports: gradient norms and spikes in the logs of training loops (trainer.report_gradient_norm)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.gradient_processors import GradientSpikeAlarmConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradient_norms import GradientNorms
from trainer_kit.optimizers.gradient_processors import GradientProcessing
from trainer_kit.optimizers.learning_rate import innermost
from trainer_kit.training.metrics import MetricSet

_LOG = logging.getLogger(__name__)
_KEY = "trainer_kit/gradient_norms"  # of the results of a loop
_ADVICE = "the training step applies gradients in another way; call trainer_kit.apply_gradients(optimizer, ...)"


class GradientReports:
    """Records the gradient norms of each optimizer in the training loop. Created in the scope of the strategy.

    It has the methods of a part of a MetricSet. Without anything to report it has no variables and no results.

    Args:
      options: The section trainer of the config.
      optimizer: The built optimizer, a dict of optimizers by name, or None.
      global_step: The global step, an int64 scalar variable.
      metrics: The set of the training metrics, which takes this as a part if there is something to report.

    Raises:
      UsageError: when a metric has the name of a report, or the trainer has no MetricSet.
    """

    def __init__(self, options: Any, optimizer: Any, global_step: tf.Variable, metrics: Any) -> None:
        self._reports_norm = bool(getattr(options, "report_gradient_norm", False))
        self._alarm = getattr(options, "gradient_spike_alarm", None)
        self._options, self._optimizer = options, optimizer
        self._norms: dict[str, GradientNorms] = {}  # by the name of the optimizer; "" for a single one
        if optimizer is not None and (self._reports_norm or self._alarm is not None):
            for name, one in _by_name(optimizer).items():
                self._norms[name] = innermost(one).gradient_norms = GradientNorms(global_step, self._alarm)
            if not isinstance(metrics, MetricSet):
                raise UsageError(
                    f"trainer.{self._asked}: several tasks that are trained together have no such report; unset it"
                )
            metrics.add_part(self)
        for name, processing in self._processings().items():
            processing.global_step, processing.optimizer_name = global_step, name

    @property
    def names(self) -> dict[str, str]:
        """The names of what is reported, each with the field of the config that asks for it."""
        of_norms = {"gradient_norm": "trainer.report_gradient_norm"} if self._reports_norm else {}
        return of_norms | ({"gradient_spikes": "trainer.gradient_spike_alarm"} if self._alarm else {})

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that belong to a loop."""
        return [variable for one in self._norms.values() for variable in one.variables]

    @property
    def persistent_variables(self) -> list[tf.Variable]:
        """The variables of the alarm; checkpoints hold their values in the state that `keep_state` adds."""
        return [variable for one in self._norms.values() for variable in one.persistent_variables]

    def reset(self) -> None:
        """Begins a loop; runs eagerly or in graph, in cross-replica context."""
        for one in self._norms.values():
            one.reset()

    def results(self) -> dict[str, Any]:
        """Returns an entry for the results of a loop, which `read` takes; runs in graph, in cross-replica context."""
        return {_KEY: {name: one.results() for name, one in self._norms.items()}} if self._norms else {}

    def read(self, results: dict[str, Any]) -> None:
        """Replaces the entry in the results of a loop by the values to report, and warns of spikes; runs eagerly.

        Args:
          results: The results of a loop, NumPy values.
        """
        found = results.pop(_KEY, {})
        if self._reports_norm:
            norms = {name: one["norm"] for name, one in found.items() if one["updates"]}
            _report(results, "gradient_norm", norms)
        if self._alarm is not None:
            _report(results, "gradient_spikes", {name: int(one["spikes"]) for name, one in found.items()})
            if spiking := {name: one for name, one in found.items() if one["spikes"]}:
                _warn(spiking, self._alarm)

    def keep_state(self, parts: Any) -> None:
        """Adds the state of the alarm to the PythonState `parts` of checkpoints."""
        if self._alarm is not None and self._norms:
            parts.add("gradient norms", lambda: {name: one.state() for name, one in self._norms.items()}, self._restore)

    def check_used(self, task: Any) -> None:
        """Checks, after the first step, that it has recorded norms and run processors as the config asks.

        Args:
          task: The task that made the optimizers.

        Raises:
          UsageError: when the step does not call `apply_gradients`, or an optimizer has not the processors of its
            section.
        """
        if self._norms and not any(one.is_used for one in self._norms.values()):
            raise UsageError(f"trainer.{self._asked}: {_ADVICE}, or unset it")
        several, processings = getattr(self._options, "optimizers", None) or {}, self._processings()
        sections = {f"optimizers.{name}": (section, [name]) for name, section in several.items()}
        one = getattr(self._options, "optimizer_config", None)
        for path, (section, names) in (sections or {"optimizer_config": (one, list(processings))}).items():
            if getattr(section, "gradient_processors", ()):
                found = [processings[name] for name in names if name in processings]
                if problem := self._problem_of_processors(found, task):
                    raise UsageError(f"trainer.{path}.gradient_processors: {problem}, or remove the processors")

    def _problem_of_processors(self, found: Sequence[GradientProcessing], task: Any) -> str:
        """Returns why the processors of an optimizer did not run in the first step; "" if they did."""
        if not found:
            return (
                f"create_optimizer of {type(task).__name__} makes an optimizer without them; call "
                "super().create_optimizer"
            )
        # An eager step traces nothing: in the first step of its period an optimizer does not process gradients yet.
        eager = not getattr(self._options, "train_tf_function", True) or tf.config.functions_run_eagerly()
        used = any(one.is_used for one in self._processings().values()) if eager else all(one.is_used for one in found)
        return "" if used else _ADVICE

    def _processings(self) -> dict[str, GradientProcessing]:
        """Returns the processors of each optimizer that has some, by its name; "" for a single one."""
        inner = {name: innermost(one) for name, one in _by_name(self._optimizer).items()}
        return {name: one.gradient_processing for name, one in inner.items() if hasattr(one, "gradient_processing")}

    @property
    def _asked(self) -> str:
        return "report_gradient_norm" if self._reports_norm else "gradient_spike_alarm"

    def _restore(self, state: Mapping[str, Any] | None) -> None:
        fits = [one.restore((state or {}).get(name)) for name, one in self._norms.items()]
        if not all(fits):
            _LOG.warning(
                "the alarm starts with an empty window, because the checkpoint's window has another length; keep "
                "trainer.gradient_spike_alarm.window to avoid it"
            )


def _by_name(optimizer: Any) -> Mapping[str, Any]:
    return optimizer if isinstance(optimizer, Mapping) else {"": optimizer}


def _report(results: dict[str, Any], key: str, values: Mapping[str, Any]) -> None:
    if values:
        results[key] = values[""] if "" in values else dict(values)


def _warn(spiking: Mapping[str, Mapping[str, Any]], alarm: GradientSpikeAlarmConfig) -> None:
    """Logs one line for the spikes of a loop."""
    name, worst = max(spiking.items(), key=lambda item: float(item[1]["largest"]))
    count = sum(int(one["spikes"]) for one in spiking.values())
    _LOG.warning(
        "gradient spike at step %d%s: the norm %.4g is above %g times %.4g, the %g quantile of the norms before it%s",
        int(worst["step"]), f" ({name})" if name else "", worst["largest"], alarm.factor, worst["quantile"],
        alarm.quantile, f"; it is the largest of {count} in this loop" if count > 1 else "",
    )  # fmt: skip
