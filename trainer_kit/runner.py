"""run_experiment: the story of a run, read top to bottom, and one entry per mode."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGINT
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit import build
from trainer_kit.checkpoints.ledger import plain
from trainer_kit.checkpoints.selection import select_checkpoint
from trainer_kit.config.schema import ExperimentConfig, TrainerConfig, folder_name_problem
from trainer_kit.controller import Controller
from trainer_kit.distribution.devices import thread_counts
from trainer_kit.distribution.peers import peers_needed
from trainer_kit.distribution.workers import chiefs_number, part, worker_count
from trainer_kit.errors import (
    DivergedError,
    InterruptedRunError,
    PreemptedError,
    StorageError,
    UsageError,
    explained,
)
from trainer_kit.modes import lookup_mode
from trainer_kit.preflight import OWN_EVALUATIONS
from trainer_kit.progress import Progress
from trainer_kit.recovery import Recovery
from trainer_kit.run_directory import RunDirectory, check_model_dir
from trainer_kit.run_lock import RunLock
from trainer_kit.signals import StopSignals
from trainer_kit.telemetry.model_stats import count_parameters
from trainer_kit.telemetry.report import Writer
from trainer_kit.timeline import Timeline
from trainer_kit.trainer import Trainer
from trainer_kit.watchdog import Watchdog

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a mode's entry works with, once all is built and, to train, the newest checkpoint is restored."""

    config: ExperimentConfig
    directory: RunDirectory
    controller: Any
    checkpoint: str
    timeline: Timeline


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
) -> tuple[Any, dict[str, Any]]:
    """Runs an experiment in one mode. Eager, on every worker.

    Args:
      distribution_strategy: of `distribution.strategy.create_strategy`; None: the current one.
      task: what is learned, made in the scope of the strategy.
      mode: train, eval, train_and_eval, continuous_eval or train_and_post_eval.
      params: the experiment's config.
      model_dir: where the run keeps its files.
      run_post_eval: evaluate once more at the end.
      save_summary: whether TensorBoard summaries are written.
      train_actions: called with the logs of each training loop.
      eval_actions: called with the logs of each evaluation.
      trainer: a ready-made one, made in the scope of the strategy.
      controller_cls: drives the trainer; any orbit.Controller.
      summary_manager: in place of the one for `model_dir/train`.
      eval_summary_manager: in place of the one for the validation summaries.
      enable_async_checkpointing: save in the background.
      checkpoint: what mode eval evaluates: latest, best, a step or a path.
      eval_name: of a continuous_eval sidecar; names its files.
      experiment: its registered name, for the record.
      allow_config_change: paths of values that may differ from those that the run in model_dir was started with.
      from_step: the checkpoint to go on from, in place of the newest; later ones are moved to archived/. 0: anew.
      allow_partial_restore: restore what fits of a checkpoint of another model, and list what does not.
      records: returns further files, name -> text, to be written with params.yaml.
      console: where progress is shown; default: the standard output.

    Returns:
      (model, logs): the logs of the last evaluation, if the mode evaluates or run_post_eval is set, else {}.

    Raises:
      UsageError: for an unknown mode, a missing checkpoint, a config that does not fit the run in model_dir.
      DataError, StorageError, DivergedError, NothingToWaitForError: see errors.EXIT_CODES.
      PreemptedError, InterruptedRunError: when SIGTERM or Ctrl-C stopped the run; it has saved.
    """
    chosen = lookup_mode(mode)
    strategy = distribution_strategy or tf.distribute.get_strategy()
    chief = build.is_chief(strategy)
    evaluates = chosen.evaluates or run_post_eval
    directory = RunDirectory(model_dir, params.trainer, sidecar=_evaluation_name(mode, eval_name))
    if chosen.trains:
        for change in check_model_dir(directory, params, experiment, allow_config_change):
            _LOG.info("changed since the run was started: %s", change)
    elif mode == "eval":
        checkpoint = select_checkpoint(model_dir, checkpoint, directory.best)
    progress, managers = Progress(), (summary_manager, eval_summary_manager)

    with contextlib.ExitStack() as run:
        run.enter_context(_alone(directory, progress) if chosen.trains and chief else NOTHING)
        run.enter_context(peers_needed())
        with strategy.scope():
            best = build.create_exporter(params, directory.own_best, chief) if evaluates and mode != "eval" else None
            trainer = trainer or build.create_trainer(params, task, chosen.trains, evaluates, best)
            build.check_best_metric(trainer, wanted=best is not None)
        signals = _guard(run, params.trainer, trainer, progress, directory)
        reports = build.open_reports(directory, chief, chosen.trains, console, save_summary, managers)
        run.enter_context(contextlib.closing(reports.writer))
        manager = build.create_manager(
            trainer, params, model_dir, enable_async_checkpointing, allow_partial_restore, from_step
        )
        run.enter_context(manager)
        timeline = build.create_timeline(directory, params, reports, trainer, "validation" if chosen.trains else "eval")
        recovery = build.create_recovery(params, trainer, manager, timeline, directory) if chosen.trains else None
        controller = controller_cls(
            strategy=strategy,
            trainer=trainer if chosen.trains else None,
            evaluator=trainer if evaluates else None,
            global_step=trainer.global_step,
            checkpoint_manager=manager,
            train_actions=build.create_actions(strategy, params, trainer, manager, train_actions),
            eval_actions=eval_actions,
            **_reporting(reports, params, directory, save_summary),
            **_extras(controller_cls, params, reports, signals, directory, timeline, recovery, strategy),
        )
        progress.follow(controller, trainer)
        start = _told_start(mode, checkpoint, trainer)
        if chosen.trains and (logs := _finished_logs(directory, start, params, evaluates)) is not None:
            return trainer.model, logs
        trainer.check_data()
        manager.archive_later()
        recorded = _recorded(directory, trainer, params, experiment, mode, records()) if reports.history else NOTHING
        with strategy.scope(), recorded, _saved_after_errors(controller):
            if chosen.trains:
                _begin(timeline, recovery, manager, controller, start)
            logs = MODE_ENTRIES[mode](Run(params, directory, controller, checkpoint, timeline))
            if run_post_eval and not _stopped(signals, trainer):
                logs = controller.evaluate(steps=params.trainer.validation_steps)
        _conclude(directory, signals, manager, reports, trainer, mode, logs)
        part(strategy)  # no worker is done before the chief is: it could not be started again alone
    return trainer.model, logs


def _begin(timeline: Timeline, recovery: Recovery | None, manager: Any, controller: Any, start: int) -> None:
    """Takes what was told before to the step that a training run goes on from."""
    if manager.goes_back_to is None:
        timeline.begin(start, anew=manager.begins_anew)
    else:
        timeline.rewind(start)
        manager.done_going_back()
    if recovery is not None and isinstance(controller, Controller):
        recovery.begin(controller)


def _guard(
    run: contextlib.ExitStack, options: TrainerConfig, trainer: Any, progress: Progress, directory: RunDirectory
) -> StopSignals:
    """Watches over all that comes, the last save and the last report included: for signals, and for what hangs."""
    signals = StopSignals(trainer.request_stop, options.preemption_grace_seconds, progress.save_late)
    run.enter_context(signals)
    run.enter_context(Watchdog(progress.of_work, directory.own, options.hang_timeout_seconds))
    return signals


NOTHING = contextlib.nullcontext()


def _alone(directory: RunDirectory, progress: Progress) -> RunLock:
    """Makes this process the only trainer in model_dir; one that ends before its run is recorded leaves no trace."""
    return RunLock(directory.path, progress.of_step, recorded=directory.is_recorded)


@contextlib.contextmanager
def _saved_after_errors(controller: Any) -> Iterator[None]:
    """Saves what an error has left sound, then lets it go on."""
    try:
        yield
    except Exception as error:
        save = getattr(controller, "save_what_is_sound", None)
        if worker_count(controller.strategy) > 1:
            save = None  # a save takes all workers: the others would not come, or are gone
        if save is not None and not isinstance(error, (DivergedError, StorageError)):
            try:
                save(error)
            except Exception as second:
                _LOG.warning("nothing could be saved after the error: %s", second)
        raise


@contextlib.contextmanager
def _recorded(
    directory: RunDirectory,
    trainer: Any,
    config: ExperimentConfig,
    experiment: str,
    mode: str,
    texts: Mapping[str, str],
) -> Iterator[None]:
    """Writes the record of the run before its first step, and takes it back when a mistake or its data allow none."""
    new = directory.missing_records(texts)
    try:
        directory.write_record(config, experiment, mode, texts, thread_counts())
        yield
    except Exception as error:
        if explained(error) and int(trainer.global_step.numpy()) == 0:
            directory.withdraw_record(new)
        raise


def _evaluation_name(mode: str, eval_name: str) -> str:
    """The name of what only evaluates: what it writes lies apart from what the training run writes."""
    if mode == "continuous_eval" and (problem := folder_name_problem(eval_name, OWN_EVALUATIONS)):
        raise UsageError(f"eval_name: {problem}")
    return {"continuous_eval": eval_name, "eval": "eval"}.get(mode, "")


def _told_start(mode: str, checkpoint: str, trainer: Any) -> int:
    """Says what is about to be done, and returns the step that it begins with."""
    start = int(trainer.global_step.numpy())
    what = {"eval": f"of {checkpoint}", "continuous_eval": "of what is there and what comes"}.get(mode)
    _LOG.info("%s %s; %s", mode, what or f"from step {start}", count_parameters(trainer.model))
    return start


def _train(run: Run) -> dict[str, Any]:
    run.controller.train(steps=run.config.trainer.train_steps)
    return {}


def _eval(run: Run) -> dict[str, Any]:
    run.controller.restore_checkpoint(run.checkpoint)
    return dict(run.controller.evaluate(steps=run.config.trainer.validation_steps))


def _train_and_eval(run: Run) -> dict[str, Any]:
    options = run.config.trainer
    logs = run.controller.train_and_evaluate(
        train_steps=options.train_steps,
        eval_steps=options.validation_steps,
        eval_interval=options.validation_interval,
    )
    if logs or getattr(run.controller, "stopping", False):
        return dict(logs or {})
    return run.timeline.metrics_at(int(run.controller.global_step.numpy()))  # evaluated before a restart


def _train_and_post_eval(run: Run) -> dict[str, Any]:
    _train(run)
    if getattr(run.controller, "stopping", False):
        return {}
    return dict(run.controller.evaluate(steps=run.config.trainer.validation_steps))


def _continuous_eval(run: Run) -> dict[str, Any]:
    options = run.config.trainer

    def finished() -> bool:
        train_steps = run.directory.train_steps(options.train_steps)  # the run's own, which may be changed and go on
        final = run.directory.read_final()
        if final is not None and final["step"] >= train_steps:
            return True
        return 0 <= train_steps <= int(run.controller.global_step.numpy())

    logs = run.controller.evaluate_continuously(
        steps=options.validation_steps, timeout=options.continuous_eval_timeout, timeout_fn=finished
    )
    return dict(logs or {})


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


def _extras(
    controller_cls: type[orbit.Controller],
    config: ExperimentConfig,
    reports: build.Reports,
    signals: StopSignals,
    directory: RunDirectory,
    timeline: Timeline,
    recovery: Recovery | None,
    strategy: tf.distribute.Strategy,
) -> dict[str, Any]:
    """What only our Controller takes."""
    if not issubclass(controller_cls, Controller):
        return {}
    options = config.trainer
    extras: dict[str, Any] = {
        "evaluated_step": lambda step: chiefs_number(strategy, timeline.evaluated_step(step)),
        "writer": reports.writer,
        "batch_size": getattr(getattr(config.task, "train_data", None), "global_batch_size", 0),
        "stopping": lambda: signals.received is not None,
        "save_on_stop": options.preemption_on_demand_checkpoint,
    }
    if recovery is not None and options.recovery_max_trials >= 0:
        extras["loss_bound"] = (options.loss_upper_bound, options.recovery_begin_steps)
        extras["on_divergence"] = recovery
    if reports.chief:
        extras["on_evaluation"] = lambda step, logs, seconds, path: timeline.ledger.append(
            step, logs, seconds, os.path.relpath(path, directory.path) if path else None
        )
    return extras


def _finished_logs(
    directory: RunDirectory, step: int, config: ExperimentConfig, evaluates: bool
) -> dict[str, Any] | None:
    """Returns the final metrics of a run that has nothing left to do, and says so; None if there is something."""
    final, wanted = directory.read_final(), config.trainer.train_steps
    if final is None or final["step"] != step or step < wanted or (evaluates and not final["metrics"]):
        return None
    _LOG.info("nothing to do: %s was finished at step %d; raise trainer.train_steps to train on", directory.path, step)
    return dict(final["metrics"]) if evaluates else {}


def _conclude(
    directory: RunDirectory,
    signals: StopSignals,
    manager: Any,
    reports: build.Reports,
    trainer: Any,
    mode: str,
    logs: Mapping[str, Any],
) -> None:
    """Notes what a training run has ended with, when all that it saved and reported is in the files."""
    _raise_if_stopped(signals, trainer)
    manager.sync()
    if reports.history is None:
        return
    reports.writer.flush()
    step = int(trainer.global_step.numpy())
    directory.write_final(step, mode, plain(logs), trainer.checkpoint_exporter)
    _LOG.info("finished at step %d; %s", step, build.model_cost(trainer))


def _stopped(signals: StopSignals, trainer: Any) -> bool:
    """Whether the run has stopped early; several workers do so together, or finish together."""
    agreed = getattr(trainer, "stop_agreed", None)
    return signals.received is not None if agreed is None else bool(agreed)


def _raise_if_stopped(signals: StopSignals, trainer: Any) -> None:
    stopped_by = signals.received
    if _stopped(signals, trainer):
        step = int(trainer.global_step.numpy())
        kind = InterruptedRunError if stopped_by == SIGINT else PreemptedError
        who = stopped_by.name if stopped_by else "another worker, which was asked to"
        raise kind(f"stopped by {who} at step {step}; the same command goes on from the last checkpoint")
