"""run_experiment and OrbitExperimentRunner with the signatures of official.core.train_lib."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orbit
import tensorflow as tf

from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.garden_trainer import Trainer
from trainer_kit.compat.model_garden.trainer_adapter import adapt_trainer
from trainer_kit.config.modes import lookup_mode
from trainer_kit.config.schema.evaluation import get_evaluation_name
from trainer_kit.errors import UsageError
from trainer_kit.evals.checkpoint_selection import INITIAL, find_newest_checkpoint
from trainer_kit.process.run_directory import RunDirectory, check_model_dir
from trainer_kit.run import runner
from trainer_kit.run.controller import Controller
from trainer_kit.runtime.collectives import is_chief
from trainer_kit.telemetry.summary_manager import SummaryManager
from trainer_kit.training.trainer_creation import create_exporter
from trainer_kit.typing import CheckpointExporter, Model

if TYPE_CHECKING:
    from trainer_kit.compat.model_garden.garden_types import (
        AdaptableTrainer,
        ExperimentParams,
        GardenTask,
    )
    from trainer_kit.compat.model_garden.multitask.train_lib import RunTasks

_LOG = logging.getLogger(__name__)


class OrbitExperimentRunner:
    """Runs an experiment of Model Garden.

    A subclass may create another trainer (`_build_trainer`) or another exporter of the best
    checkpoint (`_build_best_checkpoint_exporter`). The constructor then creates the trainer.
    Otherwise `run` creates it, or the first use of the property `trainer`. `run` also creates the
    checkpoint manager and the controller. These two are trainer_kit's. A subclass that creates its
    own is refused.

    Args:
      distribution_strategy: The strategy. None: the current one.
      task: A Model Garden task, created in strategy scope.
      mode: train, eval, train_and_eval, continuous_eval or train_and_post_eval.
      params: The experiment's config, Model Garden's or trainer_kit's.
      model_dir: The run's folder.
      run_post_eval: Whether to evaluate once more at the end.
      save_summary: Whether to write TensorBoard summaries.
      train_actions: Called with the logs of each training loop.
      eval_actions: Called with the logs of each evaluation.
      trainer: A ready-made trainer of trainer_kit or of Model Garden, created in strategy scope.
      controller_cls: A subclass of orbit.Controller. orbit.Controller itself stands for
        trainer_kit's Controller.
      summary_manager: A summary manager that replaces the one for `model_dir/train`.
      eval_summary_manager: A summary manager that replaces the one for the validation summaries.
      enable_async_checkpointing: Whether to save in the background.
      options: Keyword arguments of trainer_kit.run_experiment that Model Garden's does not have.

    Raises:
      UsageError: For an unknown mode, or a subclass that creates its own checkpoint manager or
        controller.
      ConfigError: When trainer_kit does not allow a value of `params`, or it differs from the run
        in `model_dir`.
    """

    _overridable_hooks = ("_build_trainer", "_build_best_checkpoint_exporter")

    def __init__(
        self,
        distribution_strategy: tf.distribute.Strategy | None,
        task: GardenTask | RunTasks,
        mode: str,
        params: ExperimentParams,
        model_dir: str,
        run_post_eval: bool = False,
        save_summary: bool = True,
        train_actions: list[orbit.Action] | None = None,
        eval_actions: list[orbit.Action] | None = None,
        trainer: AdaptableTrainer | None = None,
        controller_cls: type[orbit.Controller] = orbit.Controller,
        summary_manager: SummaryManager | orbit.utils.SummaryManager | None = None,
        eval_summary_manager: SummaryManager | orbit.utils.SummaryManager | None = None,
        enable_async_checkpointing: bool = False,
        **options: Any,
    ) -> None:
        for name in ("_maybe_build_checkpoint_manager", "_build_controller"):
            if hasattr(self, name):
                raise UsageError(
                    f"{type(self).__name__}.{name}: the engine creates the checkpoint manager and"
                    " the controller; remove this method, and pass controller_cls, train_actions"
                    " or eval_actions, or set trainer.max_to_keep"
                )

        self.strategy = distribution_strategy or tf.distribute.get_strategy()
        self._params = params
        self._model_dir = model_dir
        self._mode = mode
        # A task, or the tasks of a run that evaluates others than it trains. The engine hands it
        # to the trainer class, and asks it for `build_inputs` only.
        self._task: Any = task
        mode_traits = lookup_mode(mode)
        self._trains = mode_traits.trains
        self._evaluates = mode_traits.evaluates or run_post_eval
        self._config = convert(params)
        self._directory = RunDirectory(model_dir, self._config.trainer)

        self._trainer = trainer
        self._controller: Controller | orbit.Controller | None = None
        self._controller_cls = Controller if controller_cls is orbit.Controller else controller_cls
        self._options: dict[str, Any] = {
            "run_post_eval": run_post_eval,
            "save_summary": save_summary,
            "train_actions": train_actions,
            "eval_actions": eval_actions,
            "summary_manager": summary_manager,
            "eval_summary_manager": eval_summary_manager,
            "enable_async_checkpointing": enable_async_checkpointing,
            **options,
        }

        # Model Garden's constructor always creates the trainer.
        for name in self._overridable_hooks:
            if getattr(type(self), name) is not getattr(OrbitExperimentRunner, name):
                self._ensure_trainer()
                break

    @property
    def params(self) -> ExperimentParams:
        """The experiment's config that was passed in."""
        return self._params

    @property
    def model_dir(self) -> str:
        """The run's folder."""
        return self._model_dir

    @property
    def trainer(self) -> AdaptableTrainer:
        """The trainer that was passed in or created. Created now if it is used before `run`."""
        if self._trainer is None:
            return self._ensure_trainer()
        return self._trainer

    @property
    def controller(self) -> Controller | orbit.Controller:
        """The controller of the run.

        Raises:
          UsageError: Before `run` has begun.
        """
        if self._controller is None:
            raise UsageError(
                "controller and checkpoint_manager do not exist before run(); it creates them"
            )
        return self._controller

    @property
    def checkpoint_manager(self) -> tf.train.CheckpointManager:
        """The manager of the run's checkpoints.

        Raises:
          UsageError: Before `run` has begun.
        """
        return self.controller.checkpoint_manager

    def run(self) -> tuple[Model, Mapping[str, Any]]:
        """Runs the experiment. Runs eagerly, on the host.

        Returns:
          (model, logs): the last evaluation's logs with run_post_eval or in mode
          train_and_post_eval, else {}.
        """
        # None stays None: the engine creates the trainer then.
        with self.strategy.scope():
            trainer = adapt_trainer(self._trainer, self._config.runtime.random_seed)

        options = dict(self._options)
        if self._mode == "eval":
            # As in Model Garden: task.init_checkpoint needs no training, and summaries are beside
            # those of training.
            if "checkpoint" not in options and find_newest_checkpoint(self._model_dir) is None:
                _LOG.warning(
                    "%s holds no checkpoint: evaluating the weights as the task initializes them",
                    self._model_dir,
                )
                options["checkpoint"] = INITIAL
            lacks_manager = options["save_summary"] and options["eval_summary_manager"] is None
            if lacks_manager and is_chief(self.strategy):
                options["eval_summary_manager"] = SummaryManager(self._directory.eval_summary_dir)

        model, logs = runner.run_experiment(
            self.strategy,
            self._task,
            self._mode,
            self._config,
            self._model_dir,
            trainer=trainer,
            controller_cls=self._observed_controller_class(),
            **options,
        )
        evaluates_at_end = options["run_post_eval"] or self._mode == "train_and_post_eval"
        if not evaluates_at_end:
            return model, {}
        return model, logs

    def _observed_controller_class(self) -> type[Controller] | type[orbit.Controller]:
        """Returns a subclass of the controller's class.

        Its object becomes `controller` when it is created.
        """
        run = self

        class ObservedController(self._controller_cls):  # type: ignore[name-defined]
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                run._controller = self
                run._trainer = self.trainer or self.evaluator

        # The class has the name that messages should have.
        ObservedController.__name__ = self._controller_cls.__name__
        ObservedController.__qualname__ = self._controller_cls.__qualname__
        return ObservedController

    def _ensure_trainer(self) -> AdaptableTrainer:
        """Returns the trainer, and creates it unless it exists."""
        # A config that does not fit the run is refused before an exporter changes the run's files.
        if self._trains:
            allowed_changes = self._options.get("allow_config_change", ())
            check_model_dir(
                self._directory, self._config, self._options.get("experiment", ""), allowed_changes
            )
        trainer = self._trainer
        if not trainer:
            trainer = self._build_trainer(self._task, self._trains, self._evaluates)
        self._trainer = trainer
        return trainer

    def _build_trainer(
        self, task: GardenTask | RunTasks, train: bool, evaluate: bool
    ) -> AdaptableTrainer:
        """Returns the trainer. Override it to create another one."""
        with self.strategy.scope():
            exporter = None
            if evaluate and self._mode != "eval":
                exporter = self._build_best_checkpoint_exporter()
            return Trainer.create(self._config, task, train, evaluate, exporter)

    def _build_best_checkpoint_exporter(self) -> CheckpointExporter | None:
        """Returns the exporter of the best checkpoint, None in mode eval.

        Override it to create another one.
        """
        if self._mode == "eval":
            return None

        # A sidecar has a separate best folder.
        name = get_evaluation_name(self._mode, self._options.get("eval_name", "continuous_eval"))
        directory = RunDirectory(self._model_dir, self._config.trainer, sidecar=name)
        return create_exporter(self._config, directory, is_chief(self.strategy))


# The 15 parameters are not repeated here, so that the two lists cannot drift apart.
# inspect.signature and help() show them, type checkers do not.
@functools.wraps(OrbitExperimentRunner, assigned=(), updated=())
def run_experiment(*arguments: Any, **options: Any) -> tuple[Model, Mapping[str, Any]]:
    """Runs an experiment of Model Garden in one mode.

    Arguments and errors are those of OrbitExperimentRunner. Runs eagerly, on the host.

    Returns:
      (model, logs): the last evaluation's logs with run_post_eval or in mode train_and_post_eval,
      else {}.
    """
    return OrbitExperimentRunner(*arguments, **options).run()
