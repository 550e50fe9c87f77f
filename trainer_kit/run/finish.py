"""Ends a run: saves after an error, and records whether the run is finished or was stopped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.distribution.devices import only_cpus, thread_counts
from trainer_kit.distribution.peers import peers_needed
from trainer_kit.distribution.workers import worker_count
from trainer_kit.errors import (
    DivergedError,
    PreemptedError,
    StopTraining,
    StorageError,
    TrainerKitError,
    explained,
)
from trainer_kit.errors.user_exits import exits_as_errors
from trainer_kit.evals.ledger import plain
from trainer_kit.held_folder import check_held
from trainer_kit.inputs.arrays import ArraySource
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.signals import StopSignals
from trainer_kit.run.progress import BETWEEN
from trainer_kit.telemetry.flops import model_cost
from trainer_kit.telemetry.report_writers import ReportWriters
from trainer_kit.telemetry.time_advice import RunSettings, verdict
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.checks import problem_of_one_thread
from trainer_kit.training.failed_step import is_between_steps, loss_message
from trainer_kit.training.stop_flag import is_stopping

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def recorded(
    directory: RunDirectory,
    config: ExperimentConfig,
    experiment: str,
    mode: str,
    texts: Mapping[str, str],
    global_step: Any = None,
    fuse_steps: int | None = None,
) -> Iterator[None]:
    """Writes the record of a run before its first step, and takes it back when a mistake or its data allow none.

    Args:
      directory: of the run.
      config, experiment, mode, texts: what is recorded; see RunDirectory.write_record.
      global_step: variable of the steps taken: after the first one the record stays; None: it never has to.
      fuse_steps: what trainer.fuse_steps=auto has come to, if it has.
    """
    new = directory.missing_records(texts)
    try:
        directory.write_record(config, experiment, mode, texts, thread_counts(), fuse_steps)
        yield
    except Exception as error:
        if explained(error) and (global_step is None or int(global_step.numpy()) == 0):
            directory.withdraw_record(new)
        raise


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Turns the errors that come of a lost worker, and a SystemExit of the user's code, into errors that say so."""
    with peers_needed(), exits_as_errors():
        yield


@contextlib.contextmanager
def saved_after_errors(controller: Any) -> Iterator[None]:
    """Saves what an error, or the user's sys.exit, has left sound, then lets it go on.

    Raises:
      TrainerKitError: when something else than a callback or an action has raised StopTraining.
    """
    try:
        with exits_as_errors():
            yield
    except StopTraining as stop:
        raise TrainerKitError(
            f"StopTraining ({stop}) was raised in the middle of a loop or an evaluation; only callbacks, train_actions "
            "and eval_actions, which are called after them, can end a run"
        ) from stop
    except Exception as error:
        if not isinstance(error, (DivergedError, StorageError)):
            try:
                _save_what_is_sound(controller, error, alone=worker_count(controller.strategy) == 1)
            except Exception as second:
                _LOG.warning("nothing could be saved after the error: %s", second)
        raise


def _save_what_is_sound(controller: Any, error: Exception, alone: bool) -> None:
    """Saves after an error if the state is that of a step's end, and the weights are finite.

    After an error inside a step it saves only if that step has written no variable. Else it logs the checkpoint
    that the run resumes from, and how many steps are lost.

    Args:
      controller: a Controller; an orbit.Controller of the caller's saves nothing.
      error: that ends the run.
      alone: False: one of several workers, which can save only together. The others would not come, or are gone.
    """
    trainer, manager, step = controller.trainer, controller.checkpoint_manager, controller.run.step
    if not controller.saves_after_errors or trainer is None or trainer.sound is False:
        return
    if step <= max(manager.saved_step, 0):
        return
    begin, end = controller.running
    if controller.phase == "train" or not alone:
        if not alone or not begin <= step <= end or not is_between_steps(trainer, error):
            if alone:
                controller.sync()
            _LOG.warning("%s", loss_message(step, manager.saved_step, manager.saved_path, alone))
            return
        if begin < step < end:
            controller.interrupt_loop()
        trainer.sound = None
    controller.save_checkpoint()
    controller.sync()
    _LOG.info("saved step %d after the error; the same command goes on from there", step)


def was_stopped_at(directory: RunDirectory, step: int) -> bool:
    """Whether a callback or early stopping had ended the run at this step."""
    final = directory.read_final()
    return final is not None and final["step"] == step and bool(final.get("stopped"))


def finished_logs(
    directory: RunDirectory, step: int, config: ExperimentConfig, evaluates: bool, reason: str
) -> dict[str, Any] | None:
    """Returns the final metrics of a run that has nothing left to do, and says so; None if there is something.

    Args:
      directory: of the run.
      step: of its newest checkpoint.
      config: that it is started with.
      evaluates: whether metrics are wanted.
      reason: why early stopping ends the run at this step; "" if it does not. A run that only an action has stopped
        goes on.
    """
    final, wanted = directory.read_final(), config.trainer.train_steps
    if final is None or final["step"] != step or (evaluates and not final["metrics"]):
        return None
    stopped = bool(final.get("stopped")) and not step >= wanted >= 0
    if (step < wanted and not stopped) or (stopped and not reason):
        return None
    how = f"stopped early at step {step}: {reason}" if stopped else f"finished at step {step}"
    change = "trainer.early_stopping.patience, or remove trainer.early_stopping," if stopped else "trainer.train_steps"
    _LOG.info("nothing to do: %s was %s; raise %s to train on", directory.path, how, change)
    return dict(final["metrics"]) if evaluates else {}


def conclude(
    controller: Any,
    config: ExperimentConfig,
    directory: RunDirectory,
    signals: StopSignals,
    writers: ReportWriters,
    mode: str,
    logs: Mapping[str, Any],
) -> None:
    """Notes what a training run has ended with, when all that it saved and reported is in the files.

    What this process has spent its time on, and which callbacks have failed, is logged in any case.
    """
    check_held(directory.own)
    trainer = controller.trainer or controller.evaluator
    for name, count in controller.callbacks.errors.items():
        _LOG.warning("the callback %s has failed %d time%s; the run went on", name, count, "s" * (count > 1))
    if stopped(signals, trainer):
        if writers.history is not None:
            _tell(_spent_time(trainer, config, writers.times)[1])
        _raise_stopped(signals, trainer)
    with writers.times.during("save"):
        controller.sync()
    if writers.history is None:
        return
    with writers.times.during(BETWEEN):
        writers.writer.flush()
        step, cost = controller.run.step, model_cost(trainer)
    time, lines = _spent_time(trainer, config, writers.times)
    reason = "" if step >= config.trainer.train_steps >= 0 else controller.run.stop_reason
    directory.write_final(step, mode, plain(logs), trainer.checkpoint_exporter, reason, time)
    how = f"stopped early at step {step}: {reason}" if reason else f"finished at step {step}"
    _tell([f"{how}; {cost}", *lines])


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        _LOG.info("%s", line)


def _spent_time(trainer: Any, config: ExperimentConfig, ledger: TimeLedger) -> tuple[dict[str, Any], list[str]]:
    """Returns what this process has spent its time on, for final.json and as lines; nothing if none was trained."""
    times, options, runtime = ledger.account(), config.trainer, config.runtime
    if not times.steps:
        return {}, []
    fed = getattr(trainer, "data", None)  # a trainer with loops of its own may have none
    settings = RunSettings(
        steps_per_loop=options.steps_per_loop,
        checkpoint_interval=options.checkpoint_interval,
        validation_interval=options.validation_interval,
        to_compile=tuple(setting for setting, missing in _to_compile(config) if missing),
        fused=trainer.fuse_steps > 1,
        can_fuse=options.fuse_steps == 1 and not trainer.problem_of_fusing(),
        can_use_one_thread=runtime.executor == "default" and not problem_of_one_thread(trainer.strategy),
        cache=getattr(getattr(config.task, "train_data", None), "cache", False),
        prefetches=getattr(getattr(config.task, "train_data", None), "prefetch_buffer_size", None) != 0,
        saves_position=getattr(fed, "saves_position", False),
        in_memory=isinstance(getattr(fed, "made", None), ArraySource),
        on_cpu=only_cpus(),
    )
    advice = verdict(times, settings)
    return {**times.record(), "verdict": advice}, [f"time of this process: {times.line()}", advice]


def _to_compile(config: Any) -> Iterator[tuple[str, bool]]:
    """Yields the settings of compiled steps in one loop, and whether each has another value."""
    for name in ("train_tf_function", "train_tf_while_loop"):
        yield f"trainer.{name}=true", not getattr(config.trainer, name)
    yield "runtime.run_eagerly=false", config.runtime.run_eagerly


def stopped(signals: StopSignals, trainer: Any) -> bool:
    """Whether the run has stopped early; several workers do so together, or finish together."""
    return is_stopping(trainer, lambda: signals.received is not None)


def _raise_stopped(signals: StopSignals, trainer: Any) -> None:
    where = f"at step {int(trainer.global_step.numpy())}; the same command goes on from the last checkpoint"
    signals.check(where)
    if trainer.stopping_for > 0:  # this process was asked to, and not by a signal
        raise PreemptedError(f"stopped by trainer.request_stop() {where}")
    raise PreemptedError(f"another worker was asked to stop; this one stopped {where}")
