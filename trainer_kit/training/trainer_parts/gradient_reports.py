"""GradientReports: gradient norms and spikes in the logs of training loops (trainer.report_gradient_norm)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.gradient_norms import GradientSpikeAlarmConfig
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
        for processing in self._processings():
            processing.global_step = global_step

    @property
    def names(self) -> list[str]:
        """The names of what is reported."""
        return [*(["gradient_norm"] if self._reports_norm else []), *(["gradient_spikes"] if self._alarm else [])]

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that belong to a loop."""
        return [variable for one in self._norms.values() for variable in one.variables]

    @property
    def lasting_variables(self) -> list[tf.Variable]:
        """The variables of the alarm; checkpoints hold their values in the state that `keep_state` adds."""
        return [variable for one in self._norms.values() for variable in one.lasting_variables]

    def reset(self) -> None:
        """Begins a loop; eager or in graph, in cross-replica context."""
        for one in self._norms.values():
            one.reset()

    def results(self) -> dict[str, Any]:
        """Returns an entry for the results of a loop, which `read` takes; in graph, in cross-replica context."""
        return {_KEY: {name: one.results() for name, one in self._norms.items()}} if self._norms else {}

    def read(self, results: dict[str, Any]) -> None:
        """Replaces the entry in the results of a loop by the values to report, and warns of spikes; eager.

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

    def check_used(self) -> None:
        """Checks, after a step was traced, that it has applied gradients in a way that this config can look into.

        Raises:
          UsageError: when the config asks for norms or processors, and the step does not call `apply_gradients`.
        """
        if self._norms and not any(one.is_used for one in self._norms.values()):
            raise UsageError(f"trainer.{self._asked}: {_ADVICE}, or unset it")
        several = getattr(self._options, "optimizers", None) or {}
        sections = {f"optimizers.{name}": one for name, one in several.items()}
        sections = sections or {"optimizer_config": getattr(self._options, "optimizer_config", None)}
        asked = [name for name, section in sections.items() if getattr(section, "gradient_processors", ())]
        if asked and not any(one.is_used for one in self._processings()):
            raise UsageError(f"trainer.{asked[0]}.gradient_processors: {_ADVICE}, or remove the processors")

    def _processings(self) -> list[GradientProcessing]:
        inner = [innermost(one) for one in _by_name(self._optimizer).values()]
        return [one.gradient_processing for one in inner if hasattr(one, "gradient_processing")]

    @property
    def _asked(self) -> str:
        return "report_gradient_norm" if self._reports_norm else "gradient_spike_alarm"

    def _restore(self, state: Mapping[str, Any] | None) -> None:
        fits = [one.restore((state or {}).get(name)) for name, one in self._norms.items()]
        if not all(fits):
            _LOG.warning(
                "the checkpoint holds gradient norms of another window: trainer.gradient_spike_alarm begins again"
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
