"""run_experiment: builds a run, restores its newest checkpoint and runs one mode; read it from top to bottom."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.callbacks.base import Callback
from trainer_kit.callbacks.reports import epoch_place
from trainer_kit.config.run_warnings import interval_warnings, rate_end_warnings
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.distribution.collectives import barrier
from trainer_kit.errors import DataError
from trainer_kit.process.run_lock import release_all
from trainer_kit.run import assembly
from trainer_kit.run.controller import Controller
from trainer_kit.run.durations import with_durations
from trainer_kit.run.final_record import (
    conclude,
    explaining,
    finished_logs,
    recorded,
    stopped,
    was_stopped_at,
)
from trainer_kit.run.mode_entries import MODE_ENTRIES, BuiltRun
from trainer_kit.run.monitoring import guard, only_run_of_process, open_writers, show_activity
from trainer_kit.run.plan import RunOptions, RunPlan, check_agreement, plan_run, with_callbacks_of
from trainer_kit.run.progress import Progress
from trainer_kit.run.save_after_error import saved_after_errors
from trainer_kit.run.time_limit import TimeLimit
from trainer_kit.telemetry.model_stats import count_parameters
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.report_lines import epoch_text
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_parts.step_tensors import check_evaluation_tensors

_LOG = logging.getLogger(__name__)


def run_experiment(
    distribution_strategy: tf.distribute.Strategy | None,
    task: Any,
    mode: str,
    params: ExperimentConfig,
    model_dir: str,
    run_post_eval: bool = False,
    save_summary: bool = True,
    train_actions: Sequence[Any] | None = None,
    eval_actions: Sequence[Any] | None = None,
    trainer: Trainer | None = None,
    controller_cls: type[Controller] | type[orbit.Controller] = Controller,
    summary_manager: Any = None,
    eval_summary_manager: Any = None,
    enable_async_checkpointing: bool = True,
    *,
    callbacks: Sequence[Callback] | None = None,
    checkpoint: str = "latest",
    eval_name: str = "continuous_eval",
    experiment: str = "",
    allow_config_change: Iterable[str] = (),
    from_step: int | None = None,
    allow_partial_restore: bool = False,
    records: Callable[[], Mapping[str, str]] = dict,
    console: Writer | None = None,
    profile: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Runs an experiment in one mode. Called eagerly, on every worker.

    Args:
      distribution_strategy: The strategy, as from `distribution.strategy.create_strategy`; None: the current one.
      task: The task to train, made in the scope of the strategy.
      mode: train, eval, train_and_eval, continuous_eval or train_and_post_eval. (`launch` also runs
        continuous_train_and_eval.)
      params: The experiment's config.
      model_dir: The folder of the run's files.
      run_post_eval: Whether to evaluate once more at the end; a mode that does so anyway does it once.
      save_summary: Whether TensorBoard summaries are written.
      train_actions: Functions that are called with the logs of each training loop.
      eval_actions: Functions that are called with the logs of each evaluation.
      trainer: A ready-made trainer_kit.Trainer, made in the scope of the strategy.
      controller_cls: The class that drives the trainer: Controller, a subclass, or any orbit.Controller.
      summary_manager: Replaces the summary manager of `model_dir/train`.
      eval_summary_manager: Replaces the manager of the validation summaries.
      enable_async_checkpointing: Whether checkpoints are saved in the background.
      callbacks: Callbacks of the run, called after those of params.trainer.callbacks.
      checkpoint: The checkpoint that mode eval evaluates: latest, best, a step, a path, or initial for the weights as
        the task initializes them.
      eval_name: The name of a continuous_eval sidecar and of its files.
      experiment: The registered name of the experiment, for the manifest.
      allow_config_change: Paths of config values that may differ from those that the run was started with.
      from_step: The step to resume from instead of the newest checkpoint; later ones move to archived/. 0: start again.
      allow_partial_restore: Whether to restore the variables that fit from a checkpoint of another model, and to list
        the others.
      records: A function that returns the texts of further files by name, which are written with params.yaml.
      console: The writer that shows progress; None: the standard output.
      profile: The first and last step to trace for TensorBoard, as "10:20"; the trace goes to `model_dir/train`.

    Returns:
      (model, logs): the logs of the last evaluation, if the mode evaluates or run_post_eval is set, else {}.

    Raises:
      UsageError: when the mode is unknown, the checkpoint is missing, the config does not fit the run in model_dir, or
        the steps to profile are not trained.
      DataError, StorageError, DivergedError, NothingToWaitForError: see errors.EXIT_CODES.
      PreemptedError, InterruptedRunError: when SIGTERM, trainer.max_time or Ctrl-C stopped the run, after it saved.
    """
    options = RunOptions(
        run_post_eval, save_summary, train_actions, eval_actions, trainer, controller_cls, summary_manager,
        eval_summary_manager, enable_async_checkpointing, callbacks, checkpoint, eval_name, experiment,
        allow_config_change, from_step, allow_partial_restore, records, console, profile,
    )  # fmt: skip
    plan = plan_run(distribution_strategy, mode, params, model_dir, options)
    strategy, directory, config, progress = plan.strategy, plan.directory, plan.config, Progress(release_all)

    with progress.stop_signals(config.trainer.preemption_grace_seconds) as signals, contextlib.ExitStack() as stack:
        stack.enter_context(only_run_of_process())
        stack.enter_context(TimeLimit(config.trainer.max_time, signals))
        lock = stack.enter_context(plan.lock(progress))
        stack.enter_context(explaining())
        check_agreement(plan)
        shown = show_activity(stack, progress, plan.chief, console)
        with strategy.scope():
            plan = with_durations(with_callbacks_of(task, plan), task)
            trainer, config = assembly.build_trainer(plan, task), plan.config
        stack.enter_context(guard(signals, config.trainer, trainer, progress, directory))
        writers = open_writers(stack, progress, shown, plan)
        history = assembly.build_history(plan, writers, trainer)
        manager = stack.enter_context(assembly.build_manager(plan, trainer, history))
        early, sidecar = (
            assembly.build_early_stopping(plan, history),
            assembly.build_sidecar(plan, lock, trainer, writers, history),
        )

        def stopping() -> bool:
            return signals.received is not None

        controller = assembly.build_controller(plan, trainer, manager, writers, history, early, sidecar, stopping)
        progress.follow(controller, trainer)

        controller.restore_checkpoint()
        start = _log_start(plan, trainer)
        reason = assembly.reason_to_stop(early, plan, start)
        finished = functools.partial(finished_logs, directory, start, config, plan.evaluates, reason)
        try:
            trainer.check_data()
            setup = assembly.checked_setup(plan, trainer)
        except DataError:
            # The data of a finished run may be gone.
            if not plan.trains or (logs := finished()) is None:
                raise
            return trainer.model, logs
        if plan.trains and (logs := finished()) is not None:
            return trainer.model, logs
        controller.run.was_stopped = was_stopped_at(directory, start)
        check_evaluation_tensors(trainer)
        for warning in (*rate_end_warnings(config.trainer), *interval_warnings(config.trainer)) if plan.trains else ():
            _LOG.warning("%s", warning)
        manager.archive_later()
        known = (directory, plan.written, experiment, mode, records(), trainer.global_step)
        record = recorded(*known, setup) if writers.history else contextlib.nullcontext()
        with strategy.scope(), record, saved_after_errors(controller):
            if plan.trains:
                history.begin_at(start, manager)
            with controller.callbacks.around("run"):
                logs = MODE_ENTRIES[mode](BuiltRun(config, controller, plan.checkpoint, history, sidecar))
                if run_post_eval and mode != "train_and_post_eval" and not stopped(signals, trainer):
                    logs = controller.evaluate(steps=config.trainer.validation_steps)
        conclude(controller, config, plan.written, directory, signals, writers, mode, logs)
        barrier(strategy)  # no worker is done before the chief is: it could not be started again alone
    return trainer.model, logs


def _log_start(plan: RunPlan, trainer: Any) -> int:
    """Logs the mode, the step and epoch where it starts, and the model's size; returns that step."""
    start = int(trainer.global_step.numpy())
    total = plan.config.trainer.train_steps
    place = epoch_place(plan.epochs, start, total if total >= 0 else None) if plan.epochs and start else None
    epoch = f" ({epoch_text(place)})" if place else ""
    evaluated = f"of {plan.checkpoint or 'the initial weights'}"
    what = {"eval": evaluated, "continuous_eval": "of the checkpoints that exist and will come"}.get(plan.mode)
    _LOG.info("%s %s; %s", plan.mode, what or f"from step {start}{epoch}", count_parameters(trainer.model))
    return start
