"""Runs an experiment: builds the run, restores its newest checkpoint and runs one mode.

`run_experiment` has the phases in their order: limits, trainer, reports and controller, restore,
checks, work, end. Objects of a run are built in run/assembly.py.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.callbacks.callback import Callback
from trainer_kit.callbacks.early_stopping import EarlyStopping
from trainer_kit.callbacks.metrics_reporter import get_epoch_progress
from trainer_kit.callbacks.trackers import Tracker, warn_of_autologging
from trainer_kit.config.modes import lookup_mode
from trainer_kit.config.run_warnings import (
    find_save_interval_warnings,
    find_zero_rate_warnings,
)
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.errors.user_exits import convert_system_exit
from trainer_kit.evals.best.info_json import read_info
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.process.signals import BEFORE_FIRST_STEP, StopSignals
from trainer_kit.process.watchdog import Watchdog
from trainer_kit.run import assembly
from trainer_kit.run.controller import Controller, RunRewound
from trainer_kit.run.orbit_adapters import OrbitController
from trainer_kit.run.plan import RunOptions, RunPlan, check_agreement, plan_run, resolve_plan
from trainer_kit.run.progress import Progress
from trainer_kit.run.run_limits import TimeLimit, forbid_concurrent_runs
from trainer_kit.run.run_record import (
    FinishedRun,
    find_finished_run,
    finish_run,
    record_run,
    was_stopped,
)
from trainer_kit.run.save_on_error import save_after_errors
from trainer_kit.runtime.collectives import barrier, broadcast_text
from trainer_kit.runtime.lost_workers import convert_lost_worker_errors
from trainer_kit.serving.recorded_model import describe_model
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.current_activity import ActivityWatcher
from trainer_kit.telemetry.device_usage import reset_peak_memory
from trainer_kit.telemetry.model_stats import count_parameters
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.report_lines import format_epoch_progress
from trainer_kit.telemetry.run_log import collect_log
from trainer_kit.telemetry.summary_manager import SummaryManagerLike
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.step_tensors import check_evaluation_tensors
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import choose_optimizer
from trainer_kit.typing import Action, TaskLike

_LOG = logging.getLogger(__name__)


def run_experiment(
    distribution_strategy: tf.distribute.Strategy | None,
    task: TaskLike,
    mode: str,
    params: ExperimentConfig,
    model_dir: str,
    run_post_eval: bool = False,
    save_summary: bool = True,
    train_actions: Sequence[Action] | None = None,
    eval_actions: Sequence[Action] | None = None,
    trainer: Trainer | None = None,
    controller_cls: type[Any] = Controller,
    summary_manager: SummaryManagerLike | None = None,
    eval_summary_manager: SummaryManagerLike | None = None,
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
    """Runs an experiment in one mode.

    Called eagerly, on every worker.

    Args:
      distribution_strategy: The strategy, as from `runtime.strategy.create_strategy`. None means
        the current one.
      task: The task to train, made in the scope of the strategy.
      mode: train, eval, train_and_eval, continuous_eval or train_and_post_eval. (`launch` also runs
        continuous_train_and_eval.)
      params: The experiment's config.
      model_dir: The folder of the run's files.
      run_post_eval: Whether to evaluate once more at the end. Modes eval and train_and_post_eval
        evaluate once in any case.
      save_summary: Whether TensorBoard summaries are written.
      train_actions: Functions that are called with the logs of each training loop.
      eval_actions: Functions that are called with the logs of each evaluation.
      trainer: A ready-made trainer_kit.Trainer, made in the scope of the strategy.
      controller_cls: The class that drives the trainer: Controller, a subclass, or any
        orbit.Controller.
      summary_manager: Replaces the summary manager of `model_dir/train`.
      eval_summary_manager: Replaces the manager of the validation summaries.
      enable_async_checkpointing: Whether checkpoints are saved in the background.
      callbacks: Callbacks of the run, called after those of params.trainer.callbacks.
      checkpoint: The checkpoint that mode eval evaluates: latest, best, a step, a path, or initial
        for the weights as the task initializes them.
      eval_name: The name of a continuous_eval sidecar and of its files.
      experiment: The registered name of the experiment, for the manifest.
      allow_config_change: Paths of config values that may differ from those that the run was
        started with.
      from_step: The step to resume from instead of the newest checkpoint. Later checkpoints move
        to archived/. 0 starts the run again.
      allow_partial_restore: Whether to restore the variables that fit from a checkpoint of another
        model, and to list the others.
      records: A function that returns the texts of further files by name, which are written with
        params.yaml.
      console: The writer that shows progress. None means the standard output.
      profile: The first and last step to trace for TensorBoard, as "10:20". The trace goes to
        `model_dir/train`.

    Returns:
      (model, logs): the logs of the last evaluation, if the mode evaluates or run_post_eval is set,
      else {}.

    Raises:
      UsageError: when the mode is unknown, the checkpoint is missing, the config does not fit the
        run in model_dir, or the mode trains no steps to profile.
      DataError, StorageError, DivergedError, NothingToWaitForError: see errors.EXIT_CODES.
      PreemptedError, InterruptedRunError: when SIGTERM, trainer.max_time or Ctrl-C stopped the run,
        after it saved.
    """
    if trainer is None and lookup_mode(mode).trains:
        params = choose_optimizer(params, type(task))
    options = RunOptions(
        run_post_eval=run_post_eval,
        save_summary=save_summary,
        train_actions=train_actions,
        eval_actions=eval_actions,
        trainer=trainer,
        controller_cls=controller_cls,
        summary_manager=summary_manager,
        eval_summary_manager=eval_summary_manager,
        enable_async_checkpointing=enable_async_checkpointing,
        callbacks=callbacks,
        checkpoint=checkpoint,
        eval_name=eval_name,
        experiment=experiment,
        allow_config_change=allow_config_change,
        from_step=from_step,
        allow_partial_restore=allow_partial_restore,
        records=records,
        console=console,
        profile=profile,
    )
    plan = plan_run(distribution_strategy, mode, params, model_dir, options)
    progress = Progress()

    with contextlib.ExitStack() as contexts:
        log = contexts.enter_context(collect_log())

        # What can stop or refuse the run: signals, another run, the end of its time, other workers.
        grace_seconds = plan.config.trainer.preemption_grace_seconds
        signals = contexts.enter_context(StopSignals(progress, grace_seconds))
        contexts.enter_context(forbid_concurrent_runs())
        contexts.enter_context(TimeLimit(plan.config.trainer.max_time, signals))
        lock = contexts.enter_context(plan.create_lock(progress))
        contexts.enter_context(plan.directory.explain_storage_errors())
        contexts.enter_context(convert_lost_worker_errors())
        contexts.enter_context(convert_system_exit())
        check_agreement(plan)
        if plan.is_chief:
            record_path = plan.directory.params_path if plan.trains else plan.directory.ledger_path
            log.start(plan.directory.log_path, record_path)

        # The console shows what the run does while the model is built. Only the chief has one.
        chief_console = (console or ConsoleWriter(sys.stdout)) if plan.is_chief else None
        show_activity = getattr(chief_console, "show_activity", None)
        activity_watcher = None
        if show_activity is not None:
            activity_watcher = ActivityWatcher(progress, show_activity)
            contexts.enter_context(activity_watcher)

        # The peak of an earlier run in this process, such as another trial of a sweep, is not that
        # of this run.
        reset_peak_memory()

        # The trainer, with model and optimizer, and the owner of its best checkpoints. From here
        # on the plan has steps in place of epochs and shares.
        with plan.strategy.scope():
            plan = resolve_plan(plan, task)
            trainer, best_checkpoints = assembly.build_trainer(plan, task)
        config = plan.config

        # Contexts end in reverse order, so a tracker ends after the writer of its file.
        trackers = [callback for callback in plan.callbacks if isinstance(callback, Tracker)]
        names = [tracker.name for tracker in trackers]
        for tracker in trackers:
            if names.count(tracker.name) > 1:
                raise UsageError(f"callbacks: the tracker {tracker.name} is given twice; keep one")
            contexts.enter_context(tracker)

        # From here on a signal stops the trainer. One that came earlier ends the run here.
        progress.trainer = trainer
        signals.check_not_stopped(BEFORE_FIRST_STEP)
        timeout_seconds = config.trainer.hang_timeout_seconds
        watchdog = Watchdog(progress.get_progress_token, plan.directory.output_dir, timeout_seconds)
        contexts.enter_context(watchdog)

        # What the trainer reports to, what saves it, and what drives it.
        chief_log = log if plan.is_chief else None
        writers = assembly.build_writers(plan, trainer, chief_console, chief_log)
        contexts.enter_context(contextlib.closing(writers.writer))
        if activity_watcher is not None:
            # Contexts end in reverse order, so this is before the writer of the console is closed.
            contexts.callback(activity_watcher.stop)
        progress.startup_activity = "restoring the checkpoint"
        history = assembly.build_history(plan, writers, trainer, best_checkpoints)
        manager = contexts.enter_context(assembly.build_manager(plan, trainer, history))
        manager.prepare_folder(from_step)
        early_stopping = assembly.build_early_stopping(plan, history)
        sidecar = assembly.build_sidecar(plan, lock, trainer, writers, history)
        controller = assembly.build_controller(
            plan,
            trainer,
            manager=manager,
            writers=writers,
            history=history,
            early_stopping=early_stopping,
            sidecar=sidecar,
            signals=signals,
            times=progress.times,
        )
        progress.attach_controller(controller)

        # The newest checkpoint decides at which step the run starts, and whether anything is left
        # to do.
        controller.restore_checkpoint()
        start_step = int(trainer.global_step.numpy())
        _log_start(plan, trainer, start_step)
        finished_run = _agree_on_finished_run(plan, early_stopping, start_step)
        if finished_run is not None:
            # The data of a finished run may be gone. If it exists, other data is still refused.
            with contextlib.suppress(DataError):
                trainer.check_data()
                assembly.check_setup(plan, trainer)
            _LOG.info("nothing to do: %s", finished_run.advice)
            _export_weights(plan, progress)
            return trainer.model, finished_run.logs

        # The last checks and warnings before the work.
        trainer.check_data()
        setup = assembly.check_setup(plan, trainer)
        check_evaluation_tensors(trainer)
        if plan.trains:
            warn_of_autologging()
            for find_warnings in (find_save_interval_warnings, find_zero_rate_warnings):
                for warning in find_warnings(config.trainer):
                    _LOG.warning("%s", warning)
        manager.archive_later_checkpoints()

        # The work. Its record is written before the first step, and an error in it saves the run.
        recorded_run: AbstractContextManager[None] = contextlib.nullcontext()
        if plan.writes_records:
            # A run with an experiment gets its model from the task.
            model_files = {} if experiment else describe_model(task, trainer.model)
            recorded_run = record_run(
                plan.directory,
                plan.original_config,
                experiment,
                mode,
                extra_files={**model_files, **records()},
                global_step=trainer.global_step,
                setup=setup,
            )
        with plan.strategy.scope(), recorded_run, save_after_errors(controller):
            if plan.trains:
                history.begin_or_rewind(start_step, manager)
            with controller.callbacks.call_begin_and_end("run"):
                # Mode eval has already evaluated the same weights.
                evaluates_last = mode == "train_and_post_eval" or (run_post_eval and mode != "eval")
                while True:
                    try:
                        if plan.trains:
                            logs = controller.train_and_evaluate(
                                train_steps=config.trainer.train_steps,
                                eval_steps=config.trainer.validation_steps,
                                eval_interval=config.trainer.validation_interval,
                                evaluates=mode == "train_and_eval",
                            )
                            if best_checkpoints is not None:
                                # An evaluation that was recorded before may lack the best value.
                                best_checkpoints.add_best(trainer, logs)
                        else:
                            logs = _evaluate_checkpoints(plan, trainer, controller, sidecar)

                        if evaluates_last and not was_stopped(signals, trainer):
                            logs = controller.evaluate(steps=config.trainer.validation_steps)
                        break
                    except RunRewound:
                        # In the last evaluation a callback has rewound the run, so it trains again.
                        continue

        finish_run(plan, controller, signals, writers, best_checkpoints, logs)
        _export_weights(plan, progress)
    return trainer.model, logs


def _agree_on_finished_run(
    plan: RunPlan, early_stopping: EarlyStopping | None, start_step: int
) -> FinishedRun | None:
    """Returns the run that an earlier start has finished at this step.

    Returns None if something is left to do. Called on every worker, and returns the same on each.
    Early stopping reads the ledger, which only the chief has, so the chief's answer is broadcast.
    All workers read the same final.json: their folder is shared, which check_agreement checks, and
    the chief changes the file only after check_setup, where it waits for the other workers.
    """
    stop_reason = ""
    if early_stopping is not None and plan.is_chief:
        stop_reason = early_stopping.find_stop_reason(start_step)
    stop_reason = broadcast_text(plan.strategy, stop_reason)

    final = plan.directory.read_final()
    if final is None or final["step"] != start_step:
        # No start has ended, or the run continued after that start, or goes back.
        return None
    return find_finished_run(plan, final, stop_reason)


def _export_weights(plan: RunPlan, progress: Progress) -> None:
    """Exports the weights of a training run that has ended, as trainer.export asks.

    They are the best weights, or the latest ones if there are no best. An export that exists, and
    has all formats, stays.
    Called on every worker, outside of the strategy's scope. The chief exports.

    Raises:
      UsageError: when a format cannot contain the model. The run itself is complete.
      StorageError: when a file cannot be read or written.
    """
    options = plan.config.trainer
    progress.is_exporting = bool(options.export)
    try:
        if options.export and plan.writes_records:
            # Only this imports the converters.
            from trainer_kit.serving.model_export import export

            best = read_info(plan.directory.best_dir)
            step = int(progress.trainer.global_step.numpy())
            if best:
                step = best["step"]
            target = Path(plan.directory.path, "export", str(step))
            record = files.read_json(target / "export.json") or {"formats": options.export}
            missing = [name for name in options.export if name not in record["formats"]]
            if missing:
                raise UsageError(f"{target} has no {', '.join(missing)}; remove it to export again")
            if not target.exists():
                _LOG.info("exporting the weights of step %d", step)
                which = "best" if best else "latest"
                export(plan.directory.path, target, options.export, which=which)
    except UsageError as error:
        raise UsageError(f"the run is complete, but trainer.export: {error}") from error
    finally:
        # No worker is done before the chief is: the chief could not be started again alone.
        barrier(plan.strategy)


def _evaluate_checkpoints(
    plan: RunPlan,
    trainer: BaseTrainer,
    controller: Controller | OrbitController,
    sidecar: Sidecar | None,
) -> dict[str, Any]:
    """Evaluates one checkpoint, or as a sidecar those that a training run saves.

    Returns:
      The logs of the last evaluation, as NumPy values. Empty without an evaluation.
    """
    options = plan.config.trainer
    if sidecar is None:
        if plan.checkpoint:
            controller.restore_checkpoint(plan.checkpoint)
        else:
            trainer.initialize()
        return controller.evaluate(steps=options.validation_steps)

    sidecar.begin()
    logs = controller.evaluate_continuously(
        steps=options.validation_steps,
        timeout=options.continuous_eval_timeout,
        sidecar=sidecar,
        newest_only=options.continuous_eval.policy == "latest",
    )
    return logs or sidecar.last_metrics()


def _log_start(plan: RunPlan, trainer: BaseTrainer, start: int) -> None:
    """Logs the mode, the step and epoch where it starts, and the model's size."""
    if plan.mode == "eval":
        place = f"of {plan.checkpoint or 'the initial weights'}"
    elif plan.mode == "continuous_eval":
        place = "of the checkpoints that exist and will come"
    else:
        place = f"from step {start}"
        if plan.epochs and start:
            epoch_progress = get_epoch_progress(plan.epochs, start, plan.last_step)
            place += f" ({format_epoch_progress(epoch_progress)})"
    _LOG.info("%s %s; %s", plan.mode, place, count_parameters(trainer.model))
