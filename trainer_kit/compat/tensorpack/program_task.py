"""ProgramTask: a program of Tensorpack as a task of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.compat.tensorpack.callback_states import read_states, restore_states
from trainer_kit.config.schema.experiment import TaskConfig
from trainer_kit.errors import UsageError
from trainer_kit.training.task import Task

if TYPE_CHECKING:
    from trainer_kit.compat.tensorpack.program_graph import ProgramGraph
    from trainer_kit.compat.tensorpack.train.base import Trainer

_MODEL_COLLECTIONS = (
    tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES,
    tf.compat.v1.GraphKeys.MODEL_VARIABLES,
)


class Variables(tf.Module):
    """Variables of a graph by name, as checkpoints contain them.

    Attributes:
      by_name: The variables.
    """

    def __init__(self, by_name: Mapping[str, tf.Variable]) -> None:
        super().__init__("variables")
        self.by_name = dict(by_name)


class ProgramRequests(Callback):
    """Carries out what the callbacks of a program have asked for.

    Args:
      trainer: The trainer of the program.
    """

    chief_only = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._run: Run | None = None

    def run_begin(self, run: Run) -> None:
        """Keeps the run for `stop_run`."""
        self._run = run

    def stop_run(self, reason: str) -> None:
        """Asks the run to stop at this step."""
        if self._run is not None:
            self._run.stop(reason)

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Asks the run to save or to stop."""
        if self._trainer.is_save_requested:
            self._trainer.is_save_requested = False
            run.save()
        scalars = self._trainer.scalars
        # An evaluation in which a runner is missing would run it against its period.
        if not scalars.select_missing(self._trainer.inference_runners(), run.step):
            run.evaluate()

    def run_end(self, run: Run) -> None:
        """Ends the training of the program."""
        self._trainer.finish()

    def next_boundary(self, step: int) -> int | None:
        """Returns the next step that ends an epoch."""
        epoch = self._trainer.steps_per_epoch
        return step + epoch - step % epoch


class ProgramTask(Task):
    """Trains and evaluates a program of Tensorpack.

    Args:
      params: The task's config.
      logging_dir: The folder of the run's files.
      trainer: The trainer of the program, which is ready to begin.

    Attributes:
      trainer: The argument.
      requests: The callback that carries out what the program asks for.
    """

    def __init__(self, params: TaskConfig, logging_dir: str | None, trainer: Trainer) -> None:
        super().__init__(params, logging_dir)
        self.trainer = trainer
        self.requests = ProgramRequests(trainer)

    @property
    def program(self) -> ProgramGraph:
        """The graph of the program."""
        return self.trainer.program

    def build_model(self) -> Variables:
        """Returns the trainable variables, and those that layers update."""
        self.program.initialize_variables()
        names = self._get_model_names()
        return Variables({name: self.program.variables[name] for name in sorted(names)})

    def build_optimizer(self) -> Variables:
        """Returns all other variables of the graph: those of optimizers, averages and counters."""
        names = self.program.variables.keys() - self._get_model_names()
        return Variables({name: self.program.variables[name] for name in sorted(names)})

    def _get_model_names(self) -> set[str]:
        names = set()
        for key in _MODEL_COLLECTIONS:
            for variable in self.program.graph.get_collection(key):
                names.add(variable.op.name)
        return names

    def initialize(self, model: Any) -> None:
        """Lets the program load its initial values. Called in a new run only."""
        with self.trainer.enter():
            self.trainer.session_init._run_init(self.trainer.sess)

    def build_callbacks(self) -> list[Callback]:
        """Returns the callback that carries out what the program asks for."""
        return [self.requests]

    def state(self) -> dict[str, Any]:
        """Returns what callbacks and inputs remember, and the seed of the next call."""
        return {
            "first_epoch": self.trainer.loop.first_epoch,
            "steps_per_epoch": self.trainer.steps_per_epoch,
            "seed": self.program.next_seed,
            "inputs": {feeder.name: feeder.state() for feeder in self.program.feeders},
            "evaluation": self.trainer.scalars.evaluation_state(),
            "callbacks": read_states(self.trainer.callbacks),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with the state of a checkpoint.

        Raises:
          UsageError: When the run began with another epoch, or its epochs have another length.
        """
        lengths = {
            "first_epoch": self.trainer.loop.first_epoch,
            "steps_per_epoch": self.trainer.steps_per_epoch,
        }
        for name, value in lengths.items():
            if state[name] != value:
                argument = name.replace("first", "starting")
                raise UsageError(
                    f"{argument}={value}: the run in {self.logging_dir} has {argument}="
                    f"{state[name]}, and continues at its newest checkpoint by itself; leave"
                    f" {argument} as it was, or choose another logger directory"
                )
        self.program.next_seed = state["seed"]
        # The data of a runner that is new begins at its beginning.
        for feeder in self.program.feeders:
            if feeder.name in state["inputs"]:
                feeder.restore(state["inputs"][feeder.name])
        self.trainer.scalars.restore_evaluation(state["evaluation"])
        restore_states(self.trainer.callbacks, state["callbacks"])
