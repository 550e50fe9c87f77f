"""What a run knows about its evaluations: which are done, and which callbacks ask for."""

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

    A validation set may have these marks:

        mark        meaning                      it is in      set by             removed by
        requested   callbacks have asked for it  checkpoints   run.evaluate       add_evaluated
        evaluated   it need not run again        memory        add_evaluated      forget_evaluated
        announced   callbacks have its logs      checkpoints   add_evaluated      a restore
        recorded    RunHistory has its logs      the ledger    RecordEvaluation   a rewind

    The last three are marks of one step, and an evaluation sets them all. They differ after a kill:
    a run that resumes from a checkpoint of before an evaluation finds it recorded and not
    announced. `adopt_recorded` makes them equal at the step at which the run begins. The steps
    after that are trained again, so their records do not count.

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
        self._evaluated_steps: dict[str, int] = {}
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

    def add_evaluated(self, sets: Collection[str], step: int) -> None:
        """Marks validation sets as evaluated and announced at a step, and no longer requested."""
        self.requested_sets.difference_update(sets)
        steps = dict.fromkeys(sets, step)
        self._evaluated_steps.update(steps)
        self._announced_steps.update(steps)

    def forget_evaluated(self) -> None:
        """Removes all marks of evaluated sets, when the run goes back."""
        self._evaluated_steps.clear()

    def select_unevaluated(self, sets: Iterable[str], step: int) -> list[str]:
        """Returns the validation sets of `sets` that are not evaluated at a step."""
        return [name for name in sets if self._evaluated_steps.get(name) != step]

    def adopt_recorded(self, step: int) -> tuple[Logs, Logs]:
        """Marks the validation sets that are recorded at a step as evaluated and announced.

        Returns:
          (recorded, unannounced): the recorded logs by validation set, and those of them that
          callbacks have not received. The caller has to announce them.
        """
        recorded = self._read_recorded_logs(step)
        unannounced: Logs = {}
        for name, logs in recorded.items():
            if self._announced_steps.get(name) != step:
                unannounced[name] = logs
        self.add_evaluated(recorded, step)
        return recorded, unannounced

    def _read_recorded_logs(self, step: int) -> Logs:
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
