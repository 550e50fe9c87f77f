"""run_experiment and OrbitExperimentRunner with the signatures of official.core.train_lib."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.compat.model_garden.config.conversion import convert
from trainer_kit.compat.model_garden.training.adopted_trainer import adopted
from trainer_kit.compat.model_garden.training.trainer import Trainer
from trainer_kit.config.modes import lookup_mode
from trainer_kit.config.schema.evaluation import evaluation_name
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.distribution.collectives import is_chief
from trainer_kit.errors import UsageError
from trainer_kit.evals.checkpoint_selection import INITIAL, newest_checkpoint
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.run import runner
from trainer_kit.run.controller import Controller
from trainer_kit.telemetry.tensorboard import SummaryManager
from trainer_kit.training.trainer_creation import create_exporter

_LOG = logging.getLogger(__name__)


class OrbitExperimentRunner:
    """Runs an experiment of Model Garden.

    A subclass may make another trainer (`_build_trainer`) or another keeper of the best checkpoint
    (`_build_best_checkpoint_exporter`); the constructor then makes the trainer. Else `run` makes it, unless a caller
    has asked for it before. `run` also makes the checkpoint manager and the controller. Those two are trainer_kit's,
    and a subclass that makes its own is refused.

    Args:
      distribution_strategy: None: the current one.
      task: of Model Garden, made in the scope of the strategy.
      mode: train, eval, train_and_eval, continuous_eval or train_and_post_eval.
      params: the experiment's config, of Model Garden or of trainer_kit.
      model_dir: where the run keeps its files.
      run_post_eval: evaluate once more at the end.
      save_summary: whether TensorBoard summaries are written.
      train_actions: called with the logs of each training loop.
      eval_actions: called with the logs of each evaluation.
      trainer: a ready-made one, of trainer_kit or of Model Garden, made in the scope of the strategy.
      controller_cls: a subclass of orbit.Controller; orbit.Controller itself stands for trainer_kit's Controller.
      summary_manager: in place of the one for `model_dir/train`.
      eval_summary_manager: in place of the one for the validation summaries.
      enable_async_checkpointing: save in the background.
      options: keyword arguments of trainer_kit.run_experiment that Model Garden's does not have.

    Raises:
      UsageError: for an unknown mode, or a subclass that makes its own checkpoint manager or controller.
      ConfigError: when trainer_kit does not allow a value of `params`, or the run in `model_dir` had another one.
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
        """The experiment's config, as it was given."""
        return self._params

    @property
    def model_dir(self) -> str:
        """Where the run keeps its files."""
        return self._model_dir

    @property
    def trainer(self) -> Any:
        """The trainer, as it was given or made; made now, if it is asked for before `run`."""
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
            raise UsageError("controller and checkpoint_manager are made by run(); ask for them in or after it")
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
          (model, logs): the logs of the last evaluation with run_post_eval or in mode train_and_post_eval, else {}.
        """
        with self.strategy.scope():
            trainer = adopted(self._trainer, self._config.runtime.random_seed)  # None: the engine makes it
        arguments = evaluating_as_theirs(self._mode, self._config, self._model_dir, self.strategy, self._arguments)
        model, logs = runner.run_experiment(
            self.strategy, self._task, self._mode, self._config, self._model_dir, trainer=trainer, **arguments
        )
        return model, logs if self._arguments["run_post_eval"] or self._mode == "train_and_post_eval" else {}

    def _make_trainer(self) -> None:
        evaluates = self._kind.evaluates or self._arguments["run_post_eval"]
        self._trainer = self._trainer or self._build_trainer(self._task, self._kind.trains, evaluates)

    def _build_trainer(self, task: Any, train: bool, evaluate: bool) -> Any:
        """Returns the trainer; to be overridden for another one."""
        with self.strategy.scope():
            exporter = self._build_best_checkpoint_exporter() if evaluate and self._mode != "eval" else None
            return Trainer.create(self._config, task, train, evaluate, exporter)

    def _build_best_checkpoint_exporter(self) -> Any:
        """Returns what keeps the best checkpoint; to be overridden for another keeper."""
        name = evaluation_name(self._mode, self._arguments.get("eval_name", "continuous_eval"))
        directory = RunDirectory(self._model_dir, self._config.trainer, sidecar=name)
        return create_exporter(self._config, directory, is_chief(self.strategy))

    def _refuse_own_parts(self) -> None:
        for name in ("_maybe_build_checkpoint_manager", "_build_controller"):
            if hasattr(self, name):
                raise UsageError(
                    f"{type(self).__name__}.{name}: the engine makes the checkpoint manager and the controller; give "
                    "controller_cls, train_actions or eval_actions, and trainer.max_to_keep, in its place"
                )

    def _controller_made(self, controller: Any) -> None:
        self._controller, self._trainer = controller, controller.trainer or controller.evaluator


def noticed(controller_cls: type[Any], made: Callable[[Any], None]) -> type[Any]:
    """Returns a subclass of a controller class, which calls `made` with each new object.

    Args:
      controller_cls: of trainer_kit or of Orbit.
      made: called at the end of the constructor.
    """

    class Noticed(controller_cls):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made(self)

    Noticed.__name__, Noticed.__qualname__ = controller_cls.__name__, controller_cls.__qualname__  # for messages
    return Noticed


def evaluating_as_theirs(
    mode: str, config: ExperimentConfig, model_dir: str, strategy: tf.distribute.Strategy, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options of a run; in mode eval with what Model Garden's runner does differently.

    Where there is no checkpoint it evaluates the initial weights: for `task.init_checkpoint` no training is needed. And
    its summaries go to the same folder as those of a training run.

    Args:
      mode: of the run.
      config: of the experiment.
      model_dir: of the run.
      strategy: of the run.
      options: keyword arguments of trainer_kit.run_experiment; what they say is not changed.
    """
    if mode != "eval":
        return options
    directory, chosen = RunDirectory(model_dir, config.trainer), dict(options)
    if "checkpoint" not in options and newest_checkpoint(model_dir) is None:
        _LOG.warning("%s holds no checkpoint: the weights are evaluated as the task initializes them", model_dir)
        chosen["checkpoint"] = INITIAL
    writes = options.get("save_summary", True) and is_chief(strategy)
    if writes and options.get("eval_summary_manager") is None:
        chosen["eval_summary_manager"] = SummaryManager(directory.eval_summaries)
    return chosen


@functools.wraps(OrbitExperimentRunner, assigned=(), updated=())  # it has the same signature
def run_experiment(*arguments: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Runs an experiment of Model Garden in one mode; arguments and errors are those of OrbitExperimentRunner.

    Returns:
      (model, logs): the logs of the last evaluation with run_post_eval or in mode train_and_post_eval, else {}.
    """
    return OrbitExperimentRunner(*arguments, **options).run()
