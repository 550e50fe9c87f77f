"""Sets up what other threads do during a run: signals, the watchdog, the shown activity, the report writers."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import UsageError
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.signals import BEFORE_FIRST_STEP, StopSignals
from trainer_kit.process.watchdog import Watchdog
from trainer_kit.run.plan import RunPlan
from trainer_kit.run.progress import Progress
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.current_activity import CurrentActivity
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.report_writers import ReportWriters

_running = threading.RLock()


@contextlib.contextmanager
def only_run_of_process() -> Iterator[None]:
    """Raises UsageError while another thread runs an experiment; one thread may run one inside another.

    The loops of two threads can wait for each other for ever, since both need the threads of TensorFlow's only pool.
    """
    if not _running.acquire(blocking=False):
        raise UsageError("another thread of this process runs an experiment; run one after the other, or in processes")
    try:
        yield
    finally:
        _running.release()


def guard(
    signals: StopSignals, options: TrainerConfig, trainer: Any, progress: Progress, directory: RunDirectory
) -> Watchdog:
    """Lets signals stop the trainer from now on, and returns the watchdog of the run.

    Raises:
      PreemptedError, InterruptedRunError: when a signal arrived while the trainer was built.
    """
    progress.trainer = trainer
    signals.check(BEFORE_FIRST_STEP)
    return Watchdog(progress.of_work, directory.own, options.hang_timeout_seconds)


def show_activity(
    run: contextlib.ExitStack, progress: Progress, chief: bool, console: Writer | None
) -> tuple[Writer | None, Callable[[], None]]:
    """Shows slow activities of the run on the console; returns the console and a function that ends the display."""
    console = (console or ConsoleWriter(sys.stdout)) if chief else None
    show = getattr(console, "show_activity", None)
    if show is None:
        return console, lambda: None
    return console, run.enter_context(CurrentActivity(progress.of_activity, progress.total_of, show)).leave


def open_writers(
    run: contextlib.ExitStack, progress: Progress, shown: tuple[Writer | None, Callable[[], None]], plan: RunPlan
) -> ReportWriters:
    """Opens the report writers, and closes them at the end of the run, after the display of activities has ended."""
    console, end_showing = shown
    options = plan.options
    writers = ReportWriters.open(
        plan.directory,
        chief=plan.chief,
        trains=plan.trains,
        save_summary=options.save_summary,
        console=console,
        summary_managers=(options.summary_manager, options.eval_summary_manager),
        times=progress.times,
    )
    run.enter_context(contextlib.closing(writers.writer))
    run.callback(end_showing)
    progress.doing = "restoring the checkpoint"
    return writers
