"""BaseTrainer: the methods that the engine needs from a trainer, with defaults.

Orbit's train and evaluate are not among them: each trainer defines these two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_kit.training.loops.iterators import StopFlag
from trainer_kit.training.orbit_bases import AbstractEvaluator, AbstractTrainer
from trainer_kit.typing import CheckpointExporter

if TYPE_CHECKING:
    from trainer_kit.checkpoints.manager import CheckpointManager
    from trainer_kit.config.schema.experiment import ExperimentConfig


@dataclass(frozen=True)
class CustomParts:
    """The parts of a trainer that are not those of a trainer_kit.Trainer.

    The engine cannot change these parts, so it leaves out what would need to. A subclass of Trainer
    overrides methods. A trainer that is no Trainer, such as one of Orbit, replaces all steps.

    Attributes:
      replaces_steps: The trainer is no Trainer. Its steps expose no tensors, and are not split into
        micro-batches. Its loops run only as a whole, and callbacks cannot change hyper-parameters.
      overrides_train_loop: create_train_loop_fn is overridden. A restore ends without a trace of
        the loop, so a checkpoint gets the state that attributes contain. Steps are neither fused
        nor split into micro-batches. `train` resets the metrics before the loop.
      overrides_train: train is overridden. `trace_training` does nothing, unless it is overridden
        too: another loop may run. A save ends the restore. `reached_step` is None: there may be
        more steps.
      overrides_loop_begin: train_loop_begin is overridden. `trace_training` does nothing: the data
        may change.
      overrides_loop_end: train_loop_end is overridden. `reached_step` is None: there may be more
        steps.
      overrides_replica_step: _replica_train_step is overridden. Steps are not split into
        micro-batches.
      overrides_eval_reduce: eval_reduce is overridden. Evaluations reduce the outputs of steps to a
        state. The names of their metrics are not known before they run.
      overrides_eval_end: eval_end is overridden. The names of metrics are not known before an
        evaluation.
    """

    replaces_steps: bool = False
    overrides_train_loop: bool = False
    overrides_train: bool = False
    overrides_loop_begin: bool = False
    overrides_loop_end: bool = False
    overrides_replica_step: bool = False
    overrides_eval_reduce: bool = False
    overrides_eval_end: bool = False


class BaseTrainer(AbstractTrainer, AbstractEvaluator):
    """A trainer and evaluator that the engine can drive.

    Trainer is one. Inherit from this class to write another. A subclass has train, evaluate,
    global_step, strategy, task and model. It has checkpoint and state (a TrainState). It also has
    initialize, before_save and after_restore, which the checkpoint manager calls. Everything else
    has a default.

    Attributes:
      custom_parts: The parts that differ from those of a Trainer. A trainer that does not replace
        all steps has the parts of a Trainer.
      stop_flag: The StopFlag that loops check before each step. None: loops do not check one.
      can_train: Whether the trainer was created to train.
      can_evaluate: Whether the trainer was created to evaluate.
      ends_loops_early: Whether `train` may return after fewer steps than it was asked for.
      has_data_ended: Whether the training data ended in the last loop.
      reached_step: The global step after the last loop, if the loop has returned it. None: read
        global_step.
      loop_steps: The number of steps of the last loop. None when only the global step shows it. See
        Trainer.train.
      weights_finite: Whether all weights were finite at the last check. None: not checked since the
        last loop.
      should_continue_metrics: Whether the next loop continues the metrics of the last loop. It does
        if that loop was interrupted, or ended inside an epoch whose metrics are reported at its
        end.
      is_at_step_boundary: False while a loop runs: an error may then come from the middle of a
        step.
      input_seconds: The seconds that the last loop waited for batches. None if not known.
      eval_seconds: The seconds of each validation set in the last evaluation, by name.
      batch_spec: The spec of a replica's training batch. None before it is known.
      loss_tag: The name of the losses of training and of validation in TensorBoard. "" leaves them
        their names.
    """

    custom_parts: CustomParts = CustomParts(
        replaces_steps=True, overrides_train_loop=True, overrides_train=True
    )
    stop_flag: StopFlag | None = None
    can_train: bool = True
    can_evaluate: bool = True
    ends_loops_early: bool = False
    has_data_ended: bool = False
    reached_step: int | None = None
    loop_steps: int | None = 0
    weights_finite: bool | None = True
    should_continue_metrics: bool = False
    is_at_step_boundary: bool = False
    input_seconds: float | None = None
    # An evaluation replaces this dict, which all trainers share.
    eval_seconds: dict[str, float] = {}  # noqa: RUF012
    batch_spec: Any = None
    loss_tag: str = "loss"

    @property
    def class_name(self) -> str:
        """The name of the trainer's class, for messages."""
        return type(self).__name__

    @property
    def first_step_at(self) -> float:
        """The time.perf_counter() when a loop function had last run its first step. 0: not known.

        Loops that call the same function again do not change it, so it may lie before their start.
        """
        return 0.0

    @property
    def is_stop_requested(self) -> bool:
        """Whether running loops stop before their next step."""
        return self.stop_flag is not None and self.stop_flag.is_requested

    @property
    def is_stop_agreed(self) -> bool | None:
        """Whether all workers have agreed to stop. None if only one worker exists."""
        return self.stop_flag.is_agreed if self.stop_flag else None

    @property
    def seconds_since_stop_request(self) -> float:
        """The seconds since this process was asked to stop. 0 if it was not."""
        return self.stop_flag.seconds_since_request if self.stop_flag else 0.0

    @property
    def validation_set_names(self) -> tuple[str, ...]:
        """The names of the validation sets. A single set has the name ""."""
        return ("",)

    @property
    def fuse_steps(self) -> int:
        """The number of training steps in one XLA program. 1 means that steps are not fused."""
        return 1

    @property
    def checkpoint_exporter(self) -> CheckpointExporter | None:
        """The exporter with which `evaluate` exports the best weights. None: it exports nothing."""
        return None

    def register_state(
        self, name: str, get_state: Callable[[], object], restore_state: Callable[[Any], None]
    ) -> None:
        """Adds what `get_state` returns to checkpoints. The default adds nothing.

        Args:
          name: The name of the state.
          get_state: Returns the state, in JSON types.
          restore_state: Called with the state after a restore.
        """

    def validation_intervals(self, default: int | None) -> dict[str, int | None]:
        """Returns the steps between evaluations, by validation set.

        Args:
          default: The interval of sets without their own.
        """
        return dict.fromkeys(self.validation_set_names, default)

    def get_metric_weights_name(self, metric: str) -> str:
        """Returns the name of the weights that a metric of an evaluation belongs to.

        It is the name of an average, or "".
        """
        return ""

    def locate_metric(self, metric: str) -> tuple[list[str], str]:
        """Returns where the logs of an evaluation have a metric.

        Returns:
          The names of the nested logs, and the metric's name in them.
        """
        return [], metric

    def build_train_actions(
        self, params: ExperimentConfig, model_dir: str, manager: CheckpointManager
    ) -> list[Any]:
        """Returns the trainer's actions after training loops, in addition to the run's.

        Args:
          params: The experiment's config.
          model_dir: The run's folder.
          manager: The run's checkpoint manager.
        """
        return []

    def build_eval_actions(self, params: ExperimentConfig, model_dir: str) -> list[Any]:
        """Returns the trainer's actions after evaluations, in addition to the run's.

        Args:
          params: The experiment's config.
          model_dir: The folder of the evaluation.
        """
        return []

    def check_data(self) -> None:
        """Checks datasets after the restore.

        Raises:
          DataError: when a dataset is known to be empty, or endless where it must end.
        """

    def data_identities(self) -> dict[str, Any]:
        """Returns what describes the data that `check_data` has opened.

        The keys are the paths of the sections of the config. Returns {} if it is not known.
        """
        return {}

    def validation_metric_names(self) -> list[str] | None:
        """Returns the metric names of an evaluation, nested names joined by `|`.

        None if they are not known before the evaluation runs.
        """
        return None

    def request_stop(self) -> None:
        """Ends the running loop before its next step. Safe from another thread.

        The run saves its state and raises PreemptedError, as after SIGTERM. The same command
        resumes from there. A trainer without a stop flag finishes its loop first.
        """
        if self.stop_flag is not None:
            self.stop_flag.request()

    def probe_end_of_data(self) -> bool:
        """Whether the training data has ended. May take a batch to find out, which is lost.

        Called after a loop that has run no step and did not report the end of the data. The default
        takes nothing.
        """
        return False

    def find_fusing_problem(self) -> str:
        """Returns why training steps cannot be fused in one XLA program. Returns "" if they can."""
        return f"{self.class_name} builds its own training loops"

    def evaluation_batches(self) -> int | None:
        """Returns the number of batches of an evaluation. None if not known."""
        return None

    def restore_trained_weights(self) -> None:
        """Restores the trained weights if the moving average has replaced them."""

    def _is_inside_epoch(self) -> bool:
        """Whether the last loop ended inside an epoch whose metrics the next loop continues."""
        return False
