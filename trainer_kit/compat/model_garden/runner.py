"""run_experiment and OrbitExperimentRunner with the signatures of official.core.train_lib."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.compat.model_garden.adopted_trainer import adopted
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.trainer import Trainer
from trainer_kit.config.modes import lookup_mode
from trainer_kit.config.schema.evaluation import evaluation_name
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.evals.checkpoint_selection import INITIAL, newest_checkpoint
from trainer_kit.process.run_directory import RunDirectory, check_model_dir
from trainer_kit.run import runner
from trainer_kit.run.controller import Controller
from trainer_kit.runtime.collectives import is_chief
from trainer_kit.telemetry.tensorboard import SummaryManager
from trainer_kit.training.trainer_creation import create_exporter

_LOG = logging.getLogger(__name__)


class OrbitExperimentRunner:
    """Runs an experiment of Model Garden.

    A subclass may create another trainer (`_build_trainer`) or another exporter of the best checkpoint
    (`_build_best_checkpoint_exporter`); the constructor then creates the trainer. Otherwise `run` creates it, or the
    first use of the property `trainer`. `run` also creates the checkpoint manager and the controller. These two are
    trainer_kit's; a subclass that creates its own is refused.

    Args:
      distribution_strategy: The strategy; None: the current one.
      task: A Model Garden task, created in strategy scope.
      mode: train, eval, train_and_eval, continuous_eval or train_and_post_eval.
      params: The experiment's config, Model Garden's or trainer_kit's.
      model_dir: The run's folder.
      run_post_eval: Whether to evaluate once more at the end.
      save_summary: Whether to write TensorBoard summaries.
      train_actions: Called with the logs of each training loop.
      eval_actions: Called with the logs of each evaluation.
      trainer: A ready-made trainer of trainer_kit or of Model Garden, created in strategy scope.
      controller_cls: A subclass of orbit.Controller; orbit.Controller itself stands for trainer_kit's Controller.
      summary_manager: A summary manager that replaces the one for `model_dir/train`.
      eval_summary_manager: A summary manager that replaces the one for the validation summaries.
      enable_async_checkpointing: Whether to save in the background.
      options: Keyword arguments of trainer_kit.run_experiment that Model Garden's does not have.

    Raises:
      UsageError: for an unknown mode, or a subclass that creates its own checkpoint manager or controller.
      ConfigError: when trainer_kit does not allow a value of `params`, or it differs from the run in `model_dir`.
    """

    _own_hooks = ("_build_trainer", "_build_best_checkpoint_exporter")

    def __init__(
        self,
        distribution_strategy: tf.distribute.Strategy,
        task: Any,
        mode: str,
        params: Any,
        model_dir: str,
        run_post_eval: bool = False,
        save_summary: bool = True,
        train_actions: list[orbit.Action] | None = None,
        eval_actions: list[orbit.Action] | None = None,
        trainer: Any = None,
        controller_cls: type[orbit.Controller] = orbit.Controller,
        summary_manager: Any = None,
        eval_summary_manager: Any = None,
        enable_async_checkpointing: bool = False,
        **options: Any,
    ) -> None:
        self._refuse_own_parts()
        self.strategy = distribution_strategy or tf.distribute.get_strategy()
        self._params, self._model_dir, self._mode, self._task = params, model_dir, mode, task
        self._controller: Any = None
        self._arguments: dict[str, Any] = {
            "run_post_eval": run_post_eval,
            "save_summary": save_summary,
            "train_actions": train_actions,
            "eval_actions": eval_actions,
            "controller_cls": noticed(
                Controller if controller_cls is orbit.Controller else controller_cls, self._controller_made
            ),
            "summary_manager": summary_manager,
            "eval_summary_manager": eval_summary_manager,
            "enable_async_checkpointing": enable_async_checkpointing,
            **options,
        }
        self._kind = lookup_mode(mode)
        self._config = convert(params)
        self._trainer = trainer
        if any(getattr(type(self), name) is not getattr(OrbitExperimentRunner, name) for name in self._own_hooks):
            self._make_trainer()

    @property
    def params(self) -> Any:
        """The experiment's config that was passed in."""
        return self._params

    @property
    def model_dir(self) -> str:
        """The run's folder."""
        return self._model_dir

    @property
    def trainer(self) -> Any:
        """The trainer that was passed in or created; created now if it is used before `run`."""
        if self._trainer is None:
            self._make_trainer()
        return self._trainer

    @property
    def controller(self) -> Any:
        """The controller of the run.

        Raises:
          UsageError: before `run` has begun.
        """
        if self._controller is None:
            raise UsageError("controller and checkpoint_manager do not exist before run(); it creates them")
        return self._controller

    @property
    def checkpoint_manager(self) -> Any:
        """The manager of the run's checkpoints.

        Raises:
          UsageError: before `run` has begun.
        """
        return self.controller.checkpoint_manager

    def run(self) -> tuple[Any, Mapping[str, Any]]:
        """Runs the experiment.

        Returns:
          (model, logs): the last evaluation's logs with run_post_eval or in mode train_and_post_eval, else {}.
        """
        with self.strategy.scope():
            trainer = adopted(self._trainer, self._config.runtime.random_seed)  # None: the engine makes it
        arguments = with_options_of_eval(self._mode, self._config, self._model_dir, self.strategy, self._arguments)
        model, logs = runner.run_experiment(
            self.strategy, self._task, self._mode, self._config, self._model_dir, trainer=trainer, **arguments
        )
        return model, logs if self._arguments["run_post_eval"] or self._mode == "train_and_post_eval" else {}

    def _make_trainer(self) -> None:
        checked_config(self._mode, self._config, self._model_dir, self._arguments)
        evaluates = self._kind.evaluates or self._arguments["run_post_eval"]
        self._trainer = self._trainer or self._build_trainer(self._task, self._kind.trains, evaluates)

    def _build_trainer(self, task: Any, train: bool, evaluate: bool) -> Any:
        """Returns the trainer; override it to create another one."""
        with self.strategy.scope():
            exporter = self._build_best_checkpoint_exporter() if evaluate and self._mode != "eval" else None
            return Trainer.create(self._config, task, train, evaluate, exporter)

    def _build_best_checkpoint_exporter(self) -> Any:
        """Returns the exporter of the best checkpoint; override it to create another one."""
        return exporter_of_run(self._mode, self._config, self._model_dir, self.strategy, self._arguments)

    def _refuse_own_parts(self) -> None:
        for name in ("_maybe_build_checkpoint_manager", "_build_controller"):
            if hasattr(self, name):
                raise UsageError(
                    f"{type(self).__name__}.{name}: the engine creates the checkpoint manager and the controller; "
                    "remove this method, and pass controller_cls, train_actions or eval_actions, or set "
                    "trainer.max_to_keep"
                )

    def _controller_made(self, controller: Any) -> None:
        self._controller, self._trainer = controller, controller.trainer or controller.evaluator


def noticed(controller_cls: type[Any], made: Callable[[Any], None]) -> type[Any]:
    """Returns a subclass of a controller class that calls `made` with each new controller.

    Args:
      controller_cls: A controller class of trainer_kit or of Orbit.
      made: Called with the controller at the end of its constructor.
    """

    class Noticed(controller_cls):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made(self)

    Noticed.__name__, Noticed.__qualname__ = controller_cls.__name__, controller_cls.__qualname__  # for messages
    return Noticed


def checked_config(mode: str, params: Any, model_dir: str, options: Mapping[str, Any]) -> ExperimentConfig:
    """Returns `params` as a trainer_kit config; if the mode trains, checks that it fits the run in `model_dir`.

    The check comes before an exporter changes the best folder.

    Args:
      mode: The run's mode.
      params: The experiment's config, Model Garden's or trainer_kit's.
      model_dir: The run's folder.
      options: Keyword arguments of trainer_kit.run_experiment.

    Raises:
      UsageError, StorageError: as in trainer_kit.run_experiment.
    """
    config = convert(params)
    if lookup_mode(mode).trains:
        directory, allowed = RunDirectory(model_dir, config.trainer), options.get("allow_config_change", ())
        check_model_dir(directory, config, options.get("experiment", ""), allowed)
    return config


def exporter_of_run(
    mode: str, config: ExperimentConfig, model_dir: str, strategy: tf.distribute.Strategy, options: Mapping[str, Any]
) -> Any:
    """Returns trainer_kit's exporter of the best checkpoint, for a trainer that is created before the run.

    A sidecar has its own best folder. Returns None in mode eval, or when the config names no metric.

    Args:
      mode: The run's mode.
      config: The experiment's config.
      model_dir: The run's folder.
      strategy: The run's strategy.
      options: Keyword arguments of trainer_kit.run_experiment.
    """
    if mode == "eval":
        return None
    name = evaluation_name(mode, options.get("eval_name", "continuous_eval"))
    return create_exporter(config, RunDirectory(model_dir, config.trainer, sidecar=name), is_chief(strategy))


def with_options_of_eval(
    mode: str, config: ExperimentConfig, model_dir: str, strategy: tf.distribute.Strategy, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options of a run, adapted in mode eval to what Model Garden's runner does.

    Without a checkpoint, Model Garden evaluates the initial weights, because `task.init_checkpoint` needs no training.
    Its summaries go to the same folder as those of a training run.

    Args:
      mode: The run's mode.
      config: The experiment's config.
      model_dir: The run's folder.
      strategy: The run's strategy.
      options: Keyword arguments of trainer_kit.run_experiment; their values are not changed.
    """
    if mode != "eval":
        return options
    directory, chosen = RunDirectory(model_dir, config.trainer), dict(options)
    if "checkpoint" not in options and newest_checkpoint(model_dir) is None:
        _LOG.warning("%s holds no checkpoint: evaluating the weights as the task initializes them", model_dir)
        chosen["checkpoint"] = INITIAL
    writes = options.get("save_summary", True) and is_chief(strategy)
    if writes and options.get("eval_summary_manager") is None:
        chosen["eval_summary_manager"] = SummaryManager(directory.eval_summaries)
    return chosen


# The 15 parameters are not repeated here, so that the two lists cannot drift apart. inspect.signature and help() show
# them; type checkers do not.
@functools.wraps(OrbitExperimentRunner, assigned=(), updated=())
def run_experiment(*arguments: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Runs an experiment of Model Garden in one mode; arguments and errors are those of OrbitExperimentRunner.

    Returns:
      (model, logs): the last evaluation's logs with run_post_eval or in mode train_and_post_eval, else {}.
    """
    return OrbitExperimentRunner(*arguments, **options).run()
