"""What a run knows about its evaluations: which have run, and which callbacks ask for."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tensorflow as tf

from trainer_kit.evals.run_history import RunHistory
from trainer_kit.runtime.collectives import broadcast_text, is_chief
from trainer_kit.training.base_trainer import BaseTrainer

# The logs of an evaluation: NumPy values by metric, grouped by validation set if there are several.
Logs: TypeAlias = dict[str, Any]

# The name of a validation set without others beside it. Its logs are not grouped.
SINGLE_SET = ""


def ungroup_single_set(logs_by_set: Logs) -> Logs:
    """Returns logs by validation set in the form in which an evaluation returns them."""
    logs: Logs = logs_by_set.get(SINGLE_SET, logs_by_set)
    return logs


@dataclass
class LastLogs:
    """The logs of the last step that was evaluated.

    Attributes:
      logs: The logs. Empty without an evaluation.
      step: The global step. -1 without an evaluation.
    """

    logs: Logs = field(default_factory=dict)
    step: int = -1

    def add(self, logs: Logs, step: int) -> None:
        """Adds the logs of a boundary. They are empty if it has evaluated nothing."""
        if logs:
            # Validation sets of one step may be evaluated in several boundaries.
            self.logs = {**self.logs, **logs} if step == self.step else logs
            self.step = step


class EvaluationState:
    """Knows which validation sets are evaluated at a step, and which callbacks ask for.

    An evaluation of a set leaves three marks:

        run         This process has run it. A rewind removes the mark.
        announced   Callbacks have received its logs in evaluation_end. The mark is in checkpoints,
                    like the states of the callbacks. A restore replaces it.
        recorded    RunHistory has its logs on the disk. The mark outlives the process.

    A run that is killed after an evaluation may resume from a checkpoint of before it. The
    evaluation is then recorded, and not announced.

    Its methods are called eagerly, on all workers.

    Args:
      strategy: The run's strategy.
      history: Knows the recorded evaluations, on the chief. None means that none are recorded.

    Attributes:
      requested_sets: The names of the validation sets that callbacks have asked for, until they are
        evaluated. They are in checkpoints.
    """

    def __init__(self, strategy: tf.distribute.Strategy, history: RunHistory | None) -> None:
        self.requested_sets: set[str] = set()
        self._strategy = strategy
        self._history = history

        # The step of the last evaluation with each mark, by validation set.
        self._run_steps: dict[str, int] = {}
        self._announced_steps: dict[str, int] = {}

    def register_with(self, trainer: BaseTrainer) -> None:
        """Adds the announced evaluations and the requests to the checkpoints of a trainer."""
        trainer.register_state(
            "evaluated", lambda: self._announced_steps or None, self._restore_announced_steps
        )
        trainer.register_state(
            "evaluations asked for",
            lambda: sorted(self.requested_sets) or None,
            self._restore_requested_sets,
        )

    def add_run(self, sets: Collection[str], step: int) -> None:
        """Marks validation sets as run and announced at a step, which carries out requests."""
        self.requested_sets -= set(sets)
        self._run_steps.update(dict.fromkeys(sets, step))
        self.add_announced(sets, step)

    def add_announced(self, sets: Iterable[str], step: int) -> None:
        """Marks validation sets as announced at a step."""
        self._announced_steps.update(dict.fromkeys(sets, step))

    def forget_runs(self) -> None:
        """Removes all marks of what this process has run, when the run goes back."""
        self._run_steps.clear()

    def select_not_run(self, sets: Iterable[str], step: int) -> list[str]:
        """Returns the validation sets of `sets` that this process has not run at a step."""
        return [name for name in sets if self._run_steps.get(name) != step]

    def select_unevaluated(self, sets: Iterable[str], step: int) -> list[str]:
        """Returns the validation sets of `sets` that are neither run nor recorded at a step."""
        names = self.select_not_run(sets, step)
        recorded = self.read_recorded_logs(step) if names else {}
        return [name for name in names if name not in recorded]

    def select_unannounced(self, logs_by_set: Logs, step: int) -> Logs:
        """Returns the logs of the validation sets that are not announced at a step."""
        return {
            name: logs
            for name, logs in logs_by_set.items()
            if self._announced_steps.get(name) != step
        }

    def read_recorded_logs(self, step: int) -> Logs:
        """Returns the logs that the chief has recorded for a step, by validation set.

        Every worker receives them.
        """
        if self._history is None:
            return {}

        text = ""
        if is_chief(self._strategy):
            text = json.dumps(self._history.get_recorded_logs(step))
        text = broadcast_text(self._strategy, text)
        logs: Logs = json.loads(text)
        return logs

    def _restore_announced_steps(self, state: dict[str, int] | None) -> None:
        self._announced_steps = dict(state or {})

    def _restore_requested_sets(self, state: list[str] | None) -> None:
        self.requested_sets = set(state or ())
