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
from trainer_kit.checkpoints.selection import select_checkpoint
from trainer_kit.config.schema import ExperimentConfig, folder_name_problem
from trainer_kit.controller import Controller
from trainer_kit.errors import InterruptedRunError, PreemptedError, UsageError, explained
from trainer_kit.modes import lookup_mode
from trainer_kit.preflight import OWN_EVALUATIONS
from trainer_kit.run_directory import RunDirectory, check_model_dir
from trainer_kit.signals import StopSignals
from trainer_kit.telemetry.model_stats import count_parameters
from trainer_kit.telemetry.report import Writer
from trainer_kit.trainer import Trainer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What a mode's entry works with, once all is built and, to train, the newest checkpoint is restored."""

    config: ExperimentConfig
    directory: RunDirectory
    controller: Any
    checkpoint: str


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
    if model_dir is None:
        raise UsageError("model_dir must be specified, but got None")
    strategy = distribution_strategy or tf.distribute.get_strategy()
    chief = build.is_chief(strategy)
    evaluates = chosen.evaluates or run_post_eval
    directory = RunDirectory(model_dir, params.trainer, sidecar=_evaluation_name(mode, eval_name))
    if chosen.trains:
        for change in check_model_dir(directory, params, experiment, allow_config_change):
            _LOG.info("changed since the run was started: %s", change)
    elif mode == "eval":
        checkpoint = select_checkpoint(model_dir, checkpoint, directory.best)

    with strategy.scope():
        best = build.create_exporter(params, directory.own_best, chief) if evaluates and mode != "eval" else None
        trainer = trainer or build.create_trainer(params, task, chosen.trains, evaluates, best)
        build.check_best_metric(trainer, wanted=best is not None)

    reports = build.open_reports(
        directory if chief else None,
        trains=chosen.trains,
        console=console,
        train_summaries=summary_manager or build.summaries(directory.train_summaries, save_summary and chief),
        eval_summaries=eval_summary_manager or build.summaries(directory.eval_summaries, save_summary and chief),
    )
    manager = build.create_manager(trainer, params, model_dir, chief, enable_async_checkpointing)
    with contextlib.closing(reports.writer), manager, StopSignals(trainer.request_stop) as signals:
        controller = controller_cls(
            strategy=strategy,
            trainer=trainer if chosen.trains else None,
            evaluator=trainer if evaluates else None,
            global_step=trainer.global_step,
            steps_per_loop=params.trainer.steps_per_loop,
            checkpoint_manager=manager,
            summary_interval=params.trainer.summary_interval if save_summary else None,
            summary_manager=reports.train_summaries,
            eval_summary_manager=reports.eval_summaries,
            train_actions=train_actions,
            eval_actions=eval_actions,
            **_extras(controller_cls, params, reports, signals, directory, chief),
        )
        start = int(trainer.global_step.numpy())
        _LOG.info("%s", _opening_line(mode, start, checkpoint, trainer.model))
        if chosen.trains and (logs := _finished_logs(directory, start, params, evaluates)) is not None:
            return trainer.model, logs
        trainer.check_data()
        if reports.history is not None:
            reports.history.resume(start)
        recorded = _recorded(directory, trainer, params, experiment, mode, records()) if reports.history else NO_RECORD
        with strategy.scope(), recorded:
            logs = MODE_ENTRIES[mode](Run(params, directory, controller, checkpoint))
            if run_post_eval and signals.received is None:
                logs = controller.evaluate(steps=params.trainer.validation_steps)
        _raise_if_stopped(signals, trainer)
    if reports.history is not None:
        _conclude(directory, trainer, mode, logs)
    return trainer.model, logs


NO_RECORD = contextlib.nullcontext()


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
    directory.write_record(config, experiment, mode, texts)
    try:
        yield
    except Exception as error:
        if explained(error) and int(trainer.global_step.numpy()) == 0:
            directory.withdraw_record(texts)
        raise


def _evaluation_name(mode: str, eval_name: str) -> str:
    """The name of what only evaluates: what it writes lies apart from what the training run writes."""
    if mode == "continuous_eval" and (problem := folder_name_problem(eval_name, OWN_EVALUATIONS)):
        raise UsageError(f"eval_name: {problem}")
    return {"continuous_eval": eval_name, "eval": "eval"}.get(mode, "")


def _opening_line(mode: str, start: int, checkpoint: str, model: Any) -> str:
    what = {"eval": f"of {checkpoint}", "continuous_eval": "of what is there and what comes"}.get(mode)
    return f"{mode} {what or f'from step {start}'}; {count_parameters(model)}"


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
    return dict(logs or {})


def _train_and_post_eval(run: Run) -> dict[str, Any]:
    _train(run)
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


def _extras(
    controller_cls: type[orbit.Controller],
    config: ExperimentConfig,
    reports: build.Reports,
    signals: StopSignals,
    directory: RunDirectory,
    chief: bool,
) -> dict[str, Any]:
    """The summary folders, without which Orbit has one manager for both, and what only our Controller takes."""
    folders = {"summary_dir": directory.train_summaries, "eval_summary_dir": directory.eval_summaries}
    if not issubclass(controller_cls, Controller):
        return folders
    options = config.trainer
    extras: dict[str, Any] = {
        **folders,
        "evaluated_step": build.evaluated_step(directory.ledger),
        "writer": reports.writer,
        "batch_size": getattr(getattr(config.task, "train_data", None), "global_batch_size", 0),
        "stopping": lambda: signals.received is not None,
        "save_on_stop": options.preemption_on_demand_checkpoint,
    }
    if options.recovery_max_trials >= 0:
        extras["loss_bound"] = (options.loss_upper_bound, options.recovery_begin_steps)
    if chief:
        append = build.ledger(directory.ledger, config, "validation")
        extras["on_evaluation"] = lambda step, logs, seconds, path: append(
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


def _conclude(directory: RunDirectory, trainer: Any, mode: str, logs: Mapping[str, Any]) -> None:
    step = int(trainer.global_step.numpy())
    directory.write_final(step, mode, build.plain(logs), trainer.checkpoint_exporter)
    _LOG.info("finished at step %d; %s", step, build.model_cost(trainer))


def _raise_if_stopped(signals: StopSignals, trainer: Any) -> None:
    if signals.received is not None:
        step = int(trainer.global_step.numpy())
        kind = InterruptedRunError if signals.received == SIGINT else PreemptedError
        raise kind(
            f"stopped by {signals.received.name} at step {step}; the same command goes on from the last checkpoint"
        )
