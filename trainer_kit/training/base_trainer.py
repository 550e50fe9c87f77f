"""BaseTrainer: what the engine needs from a trainer besides Orbit's train and evaluate, with defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orbit

from trainer_kit.training.trainer_parts.stop_flag import StopFlag


class BaseTrainer(orbit.AbstractTrainer, orbit.AbstractEvaluator):
    """A trainer and evaluator that the engine can drive. Trainer is one; inherit from this to write another.

    A subclass has train, evaluate, global_step, strategy, task and model; checkpoint and state (a TrainState); and
    initialize, before_save and after_restore, which the checkpoint manager calls. The rest has defaults.

    Attributes:
      stop_flag: what its loops look at before each step; None: they do not.
      trains: whether it was made to train.
      data_ended: whether the training data has ended in the last loop.
      sound: whether all weights were finite at the last look; None: not checked since the last loop.
      cut_short: whether the next loop goes on with one that was stopped in the middle.
      between_steps: False while a loop runs: an error may then come from the middle of a step.
      input_seconds: that the last loop waited for batches; None when that is not known.
      loop_parts: runs its loops in parts, a LoopParts; None: whole loops only.
      current_loop: the training loop that runs, or ran last; None when it is not known.
      evaluated_batches: a counter of batches evaluated, for the watchdog; None: there is none.
      eval_seconds: that each validation set took in the last evaluation.
      batch_spec: the spec of what a replica is trained on; None before it is known.
      executor: TensorFlow's executor that runs its training loops; auto until one is chosen.
      best_is_kept_by_run: whether the run calls keep_best when the evaluation is on record; else `evaluate` keeps it.
    """

    stop_flag: StopFlag | None = None
    trains: bool = True
    data_ended: bool = False
    sound: bool | None = True
    cut_short: bool = False
    between_steps: bool = False
    input_seconds: float | None = None
    loop_parts: Any = None
    current_loop: Any = None
    evaluated_batches: Any = None
    eval_seconds: dict[str, float] = {}  # noqa: RUF012
    batch_spec: Any = None
    executor: str = "default"
    best_is_kept_by_run: bool = False

    @property
    def saves_position(self) -> bool:
        """Whether checkpoints hold the state of the data's iterator."""
        return False

    @property
    def has_arrays(self) -> bool:
        """Whether the training data is known to be in memory."""
        return False

    @property
    def tracing_seconds(self) -> float:
        """The seconds that the last loop took to begin a trace and to write it."""
        return 0.0

    @property
    def first_step_at(self) -> float:
        """The time.perf_counter() when the first step of a new loop was done; 0: not known."""
        return 0.0

    @property
    def stop_requested(self) -> bool:
        """Whether loops stop now."""
        return self.stop_flag is not None and self.stop_flag.requested

    @property
    def stop_agreed(self) -> bool | None:
        """Whether all workers have agreed to stop; None where there is only one."""
        return self.stop_flag.agreed if self.stop_flag else None

    @property
    def stopping_for(self) -> float:
        """The seconds since this process was asked to stop; 0 if it was not."""
        return self.stop_flag.seconds if self.stop_flag else 0.0

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets; a single one is called ""."""
        return ("",)

    @property
    def fuse_steps(self) -> int:
        """How many training steps are one program of XLA; 1: none is."""
        return 1

    @property
    def checkpoint_exporter(self) -> Any:
        """Keeps the best checkpoint; None: there is none to keep."""
        return None

    def keep_state(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Has checkpoints hold what `get` returns, as JSON can hold it, and `put` take it after a restore."""

    def validation_intervals(self, default: int | None) -> dict[str, int | None]:
        """Returns the steps between evaluations of each validation set; `default` where it has none of its own."""
        return dict.fromkeys(self.validation_sets, default)

    def keep_best(self, logs: dict[str, Any]) -> None:
        """Exports the weights that were evaluated if they are among the best; adds the best so far to the logs."""

    def add_best(self, logs: dict[str, Any]) -> None:
        """Adds the best so far to logs of an evaluation."""

    def own_train_actions(self, params: Any, model_dir: str, manager: Any) -> list[Any]:
        """Returns actions after training loops beside those that a run is given; `manager` is of its checkpoints."""
        return []

    def own_eval_actions(self, params: Any, model_dir: str) -> list[Any]:
        """Returns actions after evaluations beside those that a run is given; `model_dir` is the evaluation's own."""
        return []

    def check_data(self) -> None:
        """Raises DataError when a dataset is known to be empty, or not to end; called after the restore."""

    def validation_metric_names(self) -> list[str] | None:
        """Returns the names that an evaluation will report, nested ones joined by `|`; None if only a run can tell."""
        return None

    def request_stop(self) -> None:
        """Ends the running loop before its next step; safe from another thread.

        The run saves its state and raises PreemptedError, as after SIGTERM; the same command goes on from there. A
        trainer without a stop flag goes on to the end of its loop.
        """
        if self.stop_flag is not None:
            self.stop_flag.request()

    def is_out_of_data(self) -> bool:
        """Whether the training data has ended, which a loop may have kept to itself."""
        return False

    def problem_of_fusing(self) -> str:
        """Returns why training steps cannot be one program of XLA; "" if they can."""
        return f"{type(self).__name__} builds its own training loops"

    def evaluation_batches(self) -> int | None:
        """Returns how many batches an evaluation has, if that is known."""
        return None

    def end_averaging(self) -> None:
        """Puts the weights back if averages stand in their place."""
