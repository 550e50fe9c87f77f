"""ProgramTrainer: the engine's trainer of a program of Tensorpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_kit.run.evaluation_state import SINGLE_SET
from trainer_kit.training.trainer import Trainer
from trainer_kit.typing import ExperimentLike, IntLike, Model, Optimizers, TaskLike


class ProgramTrainer(Trainer):
    """Runs the steps of a ProgramTask, and its InferenceRunners.

    The program takes its steps one by one, because each may run callbacks. Its own callbacks take
    part in them, and the engine's run at loop ends.
    """

    # A ModelSaver ends a loop, so that the checkpoint is of its step.
    ends_loops_early = True
    loading_advice = (
        "a program of Tensorpack names its outputs itself; use OfflinePredictor(config) or"
        " ModelExporter(config).export_serving, with PredictConfig(session_init=SmartInit(FOLDER))"
    )

    @classmethod
    def create(
        cls,
        config: ExperimentLike,
        task: Any,
        train: bool,
        evaluate: bool,
        checkpoint_exporter: Any = None,
    ) -> Any:
        """Returns the trainer of a program's variables. Called in strategy scope."""
        model = task.build_model()
        optimizer = task.build_optimizer()
        trainer = cls(
            config, task, model, optimizer, train, evaluate, checkpoint_exporter=checkpoint_exporter
        )
        # An evaluation restores all variables, and of the run's parts only the program's.
        trainer.state.python_state.reports_unused_parts = train
        return trainer

    def train(self, num_steps: IntLike) -> dict[str, Any]:
        """Runs training steps and returns the scalars that they reported. Runs on the host."""
        program = self.task.trainer
        program.fuse_steps = self.fuse_steps
        begin = self._read_step()
        self.is_at_step_boundary = False
        done = program.run_steps(begin, int(num_steps), lambda: self.is_stop_requested)
        self.is_at_step_boundary = True
        self.loop_steps = done
        self._global_step.assign(begin + done)
        self.reached_step = begin + done
        if program.stop_reason:
            self.task.requests.stop_run(program.stop_reason)
        return program.take_scalars()

    def evaluate(self, num_steps: IntLike, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the statistics of the InferenceRunners at this step. Runs on the host."""
        program = self.task.trainer
        if not self.can_train:
            # A checkpoint contains the result of the training.
            program.scalars.forget_evaluation()
        statistics = program.evaluate(self._read_step())
        self.eval_seconds = {SINGLE_SET: program.scalars.evaluation_seconds}
        return statistics

    def trace_training(self) -> None:
        """Ends the restore, and checks the graph of the program, which is built already."""
        if not self.state.is_step_tracked:
            self._track_step(self.task.program.graph)

    def check_data(self) -> None:
        """Does nothing: the program opens its own data."""

    def validation_metric_names(self) -> list[str] | None:
        """Returns None: the names are known after an evaluation."""
        return None

    def _build_optimizers(
        self, config: ExperimentLike, task: TaskLike, model: Model, optimizer: Optimizers | None
    ) -> Optimizers | None:
        return optimizer
