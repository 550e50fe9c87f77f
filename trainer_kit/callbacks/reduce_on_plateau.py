"""ReduceOnPlateau: lowers a hyper-parameter when an evaluation metric has stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.telemetry.scalars import flatten_scalars


class ReduceOnPlateau(Callback):
    """Multiplies a hyper-parameter by a factor when a metric has stopped improving.

    It does so after `patience` evaluations without an improvement. Runs eagerly, on the host, on
    every worker.

    The rule is that of keras.callbacks.ReduceLROnPlateau. A value is an improvement if it is better
    than the best one by more than min_delta. A value that is not finite is not an improvement. Each
    step counts once. If a run is killed after an evaluation, the resumed run decides again from the
    recorded logs.

    Args:
      metric: The metric of an evaluation. With several validation sets, "set|metric".
      metric_comp: Which values of the metric are better: "lower" or "higher".
      parameter: The name of the hyper-parameter. Under a schedule, use learning_rate_factor.
      factor: The factor, between 0 and 1.
      patience: The number of evaluations without an improvement after which the value is reduced.
      min_delta: The least difference that is an improvement.
      cooldown: The number of evaluations after a reduction that do not count. As in Keras the last
        of them counts again, so 1 leaves none out.
      min_value: The lower bound of the hyper-parameter.

    Raises:
      UsageError: when an argument has a value that is not allowed.
    """

    name: str = "reduce_on_plateau"
    # With several workers, each worker sets its own variable.
    chief_only = False

    def __init__(
        self,
        metric: str,
        metric_comp: str,
        parameter: str = "learning_rate",
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_value: float = 0.0,
    ) -> None:
        if metric_comp not in ("lower", "higher"):
            raise UsageError(
                f"reduce_on_plateau: metric_comp is {metric_comp!r}; use lower or higher"
            )
        if not (_is_number(factor) and 0 < factor < 1):
            raise UsageError(
                f"reduce_on_plateau: factor is {factor!r}; use a number between 0 and 1"
            )
        for field, count, least in (("patience", patience, 1), ("cooldown", cooldown, 0)):
            if type(count) is not int or count < least:
                raise UsageError(
                    f"reduce_on_plateau: {field} is {count!r}; use a number of evaluations, {least}"
                    " or more"
                )
        for field, number in (("min_delta", min_delta), ("min_value", min_value)):
            if not (_is_number(number) and number >= 0):
                raise UsageError(
                    f"reduce_on_plateau: {field} is {number!r}; use a number, 0 or more"
                )

        self._metric = metric
        self._parameter = parameter
        self._sign = -1.0 if metric_comp == "lower" else 1.0
        self._factor = factor
        self._patience = patience
        self._min_delta = min_delta
        self._cooldown = cooldown
        self._min_value = min_value

        self._best: float | None = None
        # The number of evaluations that counted since the last improvement or reduction.
        self._evaluations_without_improvement = 0
        # The evaluations that do not count yet, after a reduction.
        self._cooldown_counter = 0
        self._last_step = -1

    def train_begin(self, run: Run) -> None:
        """Checks that the hyper-parameter and the metric exist.

        Raises:
          UsageError: when one does not exist, or the mode does not evaluate during training.
        """
        # It raises the error if the hyper-parameter does not exist.
        run.hyper_parameters.variable(self._parameter)
        if not run.trainer.can_evaluate:
            raise UsageError(
                "reduce_on_plateau: the mode does not evaluate during training; use train_and_eval"
            )

        names = run.trainer.validation_metric_names()
        if names is not None and self._metric not in names:
            raise self._unknown_metric_error(names)

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Counts the evaluation, and reduces the hyper-parameter if it is time.

        Raises:
          UsageError: when the evaluation has no such metric.
        """
        metrics = flatten_scalars(logs, "|")
        if self._metric not in metrics:
            # A metric "set|metric" may belong to a validation set that this step does not evaluate.
            set_name = self._metric.partition("|")[0]
            if set_name not in run.trainer.validation_set_names:
                raise self._unknown_metric_error(list(metrics))
            return

        # An evaluation that is repeated after a resume does not count again.
        if run.step <= self._last_step:
            return

        self._last_step = run.step
        if self._cooldown_counter > 0:
            self._cooldown_counter -= 1
            self._evaluations_without_improvement = 0

        # The first finite value is always an improvement.
        value = metrics[self._metric]
        bound = -math.inf
        if self._best is not None:
            bound = self._sign * self._best + self._min_delta
        if math.isfinite(value) and self._sign * value > bound:
            self._best = value
            self._evaluations_without_improvement = 0
        elif self._cooldown_counter == 0:
            self._evaluations_without_improvement += 1
            if self._evaluations_without_improvement >= self._patience and self._reduce(run):
                self._cooldown_counter = self._cooldown
                self._evaluations_without_improvement = 0

    def _reduce(self, run: Run) -> bool:
        """Reduces the value and returns True. Returns False at the lower bound."""
        old_value = run.hyper_parameters.value(self._parameter)
        new_value = max(old_value * self._factor, self._min_value)
        if new_value >= old_value:
            return False

        count = self._evaluations_without_improvement
        evaluations = "evaluation" if count == 1 else "evaluations"
        best = f" on {self._best:.6g}" if self._best is not None else ""
        reason = f"{self._metric} has not improved{best} in {count} {evaluations}"
        run.change(self._parameter, new_value, reason)
        return True

    def _unknown_metric_error(self, names: list[str]) -> UsageError:
        suggestion = suggest_names(self._metric, names)
        return UsageError(
            f"reduce_on_plateau: an evaluation reports no metric {self._metric!r}; {suggestion}"
        )

    def state(self) -> dict[str, Any]:
        """Returns the counters and the best value of the evaluations up to this step."""
        return {
            "best": self._best,
            "wait": self._evaluations_without_improvement,
            "cooldown": self._cooldown_counter,
            "last_step": self._last_step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned."""
        self._best = state["best"]
        self._evaluations_without_improvement = state["wait"]
        self._cooldown_counter = state["cooldown"]
        self._last_step = state["last_step"]


def _is_number(value: object) -> bool:
    # A bool is an int in Python.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)
