"""run_experiment: the story of a run, read top to bottom, and one entry per mode."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.callbacks.early_stopping import EarlyStopping
from trainer_kit.callbacks.recovery import Recovery
from trainer_kit.config.modes import Mode, lookup_mode
from trainer_kit.config.schema.evaluation import evaluation_name
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.distribution.workers import barrier, strategy_of_run, worker_count
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.evals.continuous_eval import Sidecar, with_chosen_sets
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.evals.selection import select_checkpoint
from trainer_kit.files import follow_links
from trainer_kit.held_folder import held_if_there, is_seen_lost
from trainer_kit.process.lease import Lease
from trainer_kit.process.run_directory import RunDirectory, check_model_dir
from trainer_kit.process.run_lock import RunLock, release_all
from trainer_kit.process.signals import StopSignals
from trainer_kit.run import build, finish
from trainer_kit.run.action_checks import checked_actions
from trainer_kit.run.controller import Controller
from trainer_kit.run.finish import finished_logs
from trainer_kit.run.oversight import guard, open_reports, show_activity
from trainer_kit.run.preflight import early_stopping_mistakes, profile_mistakes
from trainer_kit.run.progress import Progress
from trainer_kit.telemetry.model_stats import count_parameters
from trainer_kit.telemetry.profiler import profiled
from trainer_kit.telemetry.report import Writer
from trainer_kit.training.trainer import Trainer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a mode's entry works with, once all is built and, to train, the newest checkpoint is restored."""

    config: ExperimentConfig
    directory: RunDirectory
    controller: Any
    checkpoint: str
    history: RunHistory
    sidecar: Sidecar | None = None


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
    controller_cls: type[orbit.Controller] = Controller,
    summary_manager: Any = None,
    eval_summary_manager: Any = None,
    enable_async_checkpointing: bool = True,
    *,
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
    """Runs an experiment in one mode. Eager, on every worker.

    Args:
      distribution_strategy: of `distribution.strategy.create_strategy`; None: the current one.
      task: what is learned, made in the scope of the strategy.
      mode: train, eval, train_and_eval, continuous_eval or train_and_post_eval (continuous_train_and_eval: `launch`).
      params: the experiment's config.
      model_dir: where the run keeps its files.
      run_post_eval: evaluate once more at the end, if the mode does not do just that.
      save_summary: whether TensorBoard summaries are written.
      train_actions: called with the logs of each training loop.
      eval_actions: called with the logs of each evaluation.
      trainer: a ready-made trainer_kit.Trainer, made in the scope of the strategy.
      controller_cls: drives the trainer; any orbit.Controller.
      summary_manager: in place of the one for `model_dir/train`.
      eval_summary_manager: in place of the one for the validation summaries.
      enable_async_checkpointing: save in the background.
      checkpoint: what mode eval evaluates: latest, best, initial (as the task initializes them), a step or a path.
      eval_name: of a continuous_eval sidecar; names its files.
      experiment: its registered name, for the record.
      allow_config_change: paths of values that may differ from those that the run in model_dir was started with.
      from_step: the checkpoint to go on from, in place of the newest; later ones are moved to archived/. 0: anew.
      allow_partial_restore: restore what fits of a checkpoint of another model, and list what does not.
      records: returns further files, name -> text, to be written with params.yaml.
      console: where progress is shown; default: the standard output.
      profile: the first and the last step of those to trace for TensorBoard, as "10:20", into `model_dir/train`.

    Returns:
      (model, logs): the logs of the last evaluation, if the mode evaluates or run_post_eval is set, else {}.

    Raises:
      UsageError: for an unknown mode, a missing checkpoint, a config that does not fit the run in model_dir, steps to
        profile that there are none of.
      DataError, StorageError, DivergedError, NothingToWaitForError: see errors.EXIT_CODES.
      PreemptedError, InterruptedRunError: when SIGTERM or Ctrl-C stopped the run; it has saved.
    """
    progress, managers = Progress(release_all), (summary_manager, eval_summary_manager)
    chosen, params = _lookup_single(mode, profile), with_chosen_sets(params) if mode == "continuous_eval" else params
    train_actions, eval_actions = checked_actions(train_actions, eval_actions)
    strategy = strategy_of_run(distribution_strategy)
    chief, evaluates = build.is_chief(strategy), chosen.evaluates or run_post_eval
    directory = RunDirectory(follow_links(model_dir), params.trainer, sidecar=evaluation_name(mode, eval_name))
    checkpoint = _look_at_model_dir(directory, mode, params, experiment, allow_config_change, checkpoint)

    with progress.stop_signals(params.trainer.preemption_grace_seconds) as signals, contextlib.ExitStack() as run:
        lock = run.enter_context(_alone(strategy, directory, progress, mode, eval_name))
        run.enter_context(finish.explaining())
        shown = show_activity(run, progress, chief, console)
        with strategy.scope():
            best = build.create_exporter(params, directory, chief) if evaluates and mode != "eval" else None
            own = build.with_kept_choice(params, directory) if chosen.trains else params
            trainer = trainer or build.create_trainer(own, task, chosen.trains, evaluates, best)
            _check_parts(params.trainer, mode, trainer, controller_cls, best)
        run.enter_context(guard(signals, params.trainer, trainer, progress, directory))
        reports = open_reports(run, progress, shown, directory, chief, chosen.trains, save_summary, managers)
        options = (enable_async_checkpointing, allow_partial_restore, from_step)
        history = build.create_history(directory, params, reports, trainer, "validation" if chosen.trains else "eval")
        manager = run.enter_context(build.create_manager(trainer, params, directory.path, *options, reports, history))
        early = build.create_early_stopping(directory, history, trainer, params.trainer, chosen.trains)
        sidecar = build.create_sidecar(directory, history, trainer, params, lock, reports)
        recovery = build.create_recovery(params, trainer, manager, history, directory) if chosen.trains else None
        controller = controller_cls(
            strategy=strategy,
            trainer=trainer if chosen.trains else None,
            evaluator=trainer if evaluates else None,
            global_step=trainer.global_step,
            checkpoint_manager=manager,
            train_actions=[*build.create_actions(strategy, params, trainer, manager, train_actions), *early.actions],
            eval_actions=build.create_eval_actions(params, trainer, directory, eval_actions),
            **_reporting(reports, params, directory, save_summary),
            **_extras(controller_cls, params, reports, signals, directory, history, recovery, early, sidecar),
        )
        progress.follow(controller, trainer)
        start = _told_start(mode, checkpoint, trainer)
        if chosen.trains and (logs := finished_logs(directory, start, params, evaluates, early.reason)) is not None:
            return trainer.model, logs
        fused = build.get_ready_to_train(trainer, params, directory, reports.train_summaries)
        manager.archive_later()
        known = (directory, params, experiment, mode)
        record = finish.recorded(*known, records(), trainer.global_step, fused) if reports.history else NOTHING
        traced = profiled(trainer, profile, directory.train_summaries, writes=chief)
        with strategy.scope(), record, finish.saved_after_errors(controller), traced:
            _begin(chosen, history, recovery, manager, controller, start, early)
            described = Run(params, directory, controller, checkpoint, history, sidecar)
            logs, reason = finish.until_stopped(MODE_ENTRIES[mode], described, lambda: finish.stopped(signals, trainer))
            if run_post_eval and mode != "train_and_post_eval" and not finish.stopped(signals, trainer):
                logs = controller.evaluate(steps=params.trainer.validation_steps)
        finish.conclude(described, signals, manager, reports, trainer, mode, logs, reason)
        barrier(strategy)  # no worker is done before the chief is: it could not be started again alone
    return trainer.model, logs


def _lookup_single(mode: str, profile: str | None) -> Mode:
    """Returns the mode, which has to be one of a single run, and one that trains if steps are to be profiled."""
    chosen = lookup_mode(mode)
    if not chosen.single:
        raise UsageError(
            f"mode {mode} needs a new task for each checkpoint: start it by trainer_kit.launch(config, {mode!r}, "
            "model_dir), or by python -m trainer_kit.train"
        )
    if mistakes := profile_mistakes(profile, mode):
        raise ConfigError(mistakes)
    return chosen


def _look_at_model_dir(
    directory: RunDirectory,
    mode: str,
    params: ExperimentConfig,
    experiment: str,
    allowed: Iterable[str],
    checkpoint: str,
) -> str:
    """Checks that a training run may go on there, and returns the checkpoint that mode eval was asked to evaluate."""
    if lookup_mode(mode).trains:
        for change in check_model_dir(directory, params, experiment, allowed):
            _LOG.info("changed since the run was started: %s", change)
    return select_checkpoint(directory.path, checkpoint, directory.best) if mode == "eval" else checkpoint


def _check_parts(
    options: TrainerConfig,
    mode: str,
    trainer: Any,
    controller_cls: type,
    best: Any,
) -> None:
    """Checks the trainer, and that the best and early stopping have their metrics; first, on every worker."""
    build.check_trainer(trainer)
    build.check_best_metric(trainer, wanted=best is not None)
    if lookup_mode(mode).trains and options.recovery_max_trials > 0 and not issubclass(controller_cls, Controller):
        raise UsageError(
            f"trainer.recovery_max_trials: {controller_cls.__name__} does not go back after a divergence; give a "
            "controller_cls that is a trainer_kit.run.controller.Controller, or set trainer.recovery_max_trials=0"
        )
    if options.early_stopping is None or not lookup_mode(mode).trains:
        return
    if mistakes := early_stopping_mistakes(options, mode):
        raise ConfigError(mistakes)
    if not issubclass(controller_cls, Controller):
        raise UsageError(
            f"trainer.early_stopping: {controller_cls.__name__} keeps no ledger of evaluations, by which it stops; "
            "give a controller_cls that is a trainer_kit.run.controller.Controller, or remove trainer.early_stopping"
        )
    build.check_early_stopping_metric(options.early_stopping, trainer)


def _begin(
    mode: Mode, history: RunHistory, recovery: Recovery | None, manager: Any, controller: Any, start: int, early: Any
) -> None:
    """In a mode that trains: takes what was reported before to the step that the run goes on from, or ends at."""
    if not mode.trains:
        return
    if manager.goes_back_to is None:
        history.begin(start, anew=manager.begins_anew)
    else:
        history.rewind(start)
        manager.done_going_back()
    if recovery is not None and isinstance(controller, Controller):
        recovery.begin(controller)
    if reason := early.reason(start):
        controller.stop_request.ask(reason)


NOTHING = contextlib.nullcontext()


def _alone(
    strategy: tf.distribute.Strategy, directory: RunDirectory, progress: Progress, mode: str, eval_name: str
) -> AbstractContextManager[Any]:
    """Makes this process the only trainer in model_dir, or the only sidecar of its name.

    One that ends before its run, or an evaluation, is recorded leaves no trace.

    Raises:
      UsageError: for a sidecar of several workers: each would choose its checkpoints by itself.
    """
    if mode == "continuous_eval":
        if worker_count(strategy) > 1:
            raise UsageError("continuous_eval runs on one worker; start it without a cluster (TF_CONFIG, worker_hosts)")
        evaluated = functools.partial(os.path.exists, directory.ledger)
        return Lease(directory.evals, eval_name, progress.of_step, evaluated, on_lost=progress.request_stop)
    if not build.is_chief(strategy) or not lookup_mode(mode).trains:
        return held_if_there(directory.path)
    return RunLock(directory.path, progress.of_step, recorded=directory.is_recorded, on_lost=progress.request_stop)


def _told_start(mode: str, checkpoint: str, trainer: Any) -> int:
    """Says what is about to be done, and returns the step that it begins with."""
    start = int(trainer.global_step.numpy())
    evaluated = f"of {checkpoint or 'the initial weights'}"
    what = {"eval": evaluated, "continuous_eval": "of what is there and what comes"}.get(mode)
    _LOG.info("%s %s; %s", mode, what or f"from step {start}", count_parameters(trainer.model))
    return start


def _train(run: Run) -> dict[str, Any]:
    run.controller.train(steps=run.config.trainer.train_steps)
    return {}


def _eval(run: Run) -> dict[str, Any]:
    if run.checkpoint:
        run.controller.restore_checkpoint(run.checkpoint)
    else:
        run.controller.evaluator.initialize()
    return dict(run.controller.evaluate(steps=run.config.trainer.validation_steps))


def _train_and_eval(run: Run) -> dict[str, Any]:
    options = run.config.trainer
    logs = run.controller.train_and_evaluate(
        train_steps=options.train_steps,
        eval_steps=options.validation_steps,
        eval_interval=options.validation_interval,
    )
    if getattr(run.controller, "stopping", False):
        return dict(logs or {})
    recorded = run.history.metrics_at(int(run.controller.global_step.numpy()))  # evaluated before a restart
    if logs:  # then it was some of several validation sets, at most
        recorded = {name: metrics for name, metrics in recorded.items() if name in run.history.ledger.sets}
    return {**recorded, **logs}


def _train_and_post_eval(run: Run) -> dict[str, Any]:
    _train(run)
    if getattr(run.controller, "stopping", False):
        return {}
    return dict(run.controller.evaluate(steps=run.config.trainer.validation_steps))


def _continuous_eval(run: Run) -> dict[str, Any]:
    options = run.config.trainer
    assert run.sidecar is not None
    run.sidecar.begin()
    logs = run.controller.evaluate_continuously(
        steps=options.validation_steps, timeout=options.continuous_eval_timeout, timeout_fn=run.sidecar.finished
    )
    return dict(logs or run.sidecar.last_metrics())


MODE_ENTRIES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "train": _train,
    "eval": _eval,
    "train_and_eval": _train_and_eval,
    "train_and_post_eval": _train_and_post_eval,
    "continuous_eval": _continuous_eval,
}


def _reporting(
    reports: build.Reports, config: ExperimentConfig, directory: RunDirectory, save_summary: bool
) -> dict[str, Any]:
    """How often loops report, and where to; without both folders Orbit has one manager for both."""
    return {
        "steps_per_loop": config.trainer.steps_per_loop,
        "summary_interval": config.trainer.summary_interval if save_summary else None,
        "summary_manager": reports.train_summaries,
        "eval_summary_manager": reports.eval_summaries,
        "summary_dir": directory.train_summaries,
        "eval_summary_dir": directory.eval_summaries,
    }


def _agreed(early: EarlyStopping, history: RunHistory, step: int) -> set[str]:
    """The validation sets that the chief has on record for `step`, on every worker: as the bits of a number."""
    names, found = list(history.ledger.sets) or [""], history.recorded_sets(step)
    bits = early.agree(sum(1 << place for place, name in enumerate(names) if name in found))
    return {name for place, name in enumerate(names) if bits >> place & 1}


def _extras(
    controller_cls: type[orbit.Controller],
    config: ExperimentConfig,
    reports: build.Reports,
    signals: StopSignals,
    directory: RunDirectory,
    history: RunHistory,
    recovery: Recovery | None,
    early: EarlyStopping,
    sidecar: Sidecar | None,
) -> dict[str, Any]:
    """What only our Controller takes."""
    if not issubclass(controller_cls, Controller):
        return {}
    options = config.trainer
    extras: dict[str, Any] = {
        "recorded_sets": lambda step: _agreed(early, history, step),
        "on_return": build.create_return(directory, history),
        "writer": reports.writer,
        "times": reports.times,
        "batch_size": getattr(getattr(config.task, "train_data", None), "global_batch_size", 0),
        "stopping": lambda: is_seen_lost(directory.own) or signals.received is not None,
        "save_on_stop": options.preemption_on_demand_checkpoint,
    }
    if recovery is not None and options.recovery_max_trials >= 0:
        extras["loss_bound"] = (options.loss_upper_bound, options.recovery_begin_steps)
        extras["on_divergence"] = recovery
    if sidecar is not None:
        return {**extras, "followed": sidecar, "newest_only": options.continuous_eval.policy == "latest"}

    def on_evaluation(step: int, logs: Mapping[str, Any], seconds: float, path: str | None) -> None:
        if reports.chief:
            history.ledger.append(step, logs, seconds, os.path.relpath(path, directory.path) if path else None)
        early.after_evaluation(step)

    return {**extras, "on_evaluation": on_evaluation}
