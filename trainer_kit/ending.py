"""How a run ends: what is saved after an error, and what is noted when it is finished or was stopped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from signal import SIGINT
from typing import Any

from trainer_kit import build
from trainer_kit.checkpoints.ledger import plain
from trainer_kit.config.schema import ExperimentConfig
from trainer_kit.distribution.workers import worker_count
from trainer_kit.errors import DivergedError, InterruptedRunError, PreemptedError, StorageError
from trainer_kit.run_directory import RunDirectory
from trainer_kit.signals import StopSignals

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def saved_after_errors(controller: Any) -> Iterator[None]:
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


def finished_logs(
    directory: RunDirectory, step: int, config: ExperimentConfig, evaluates: bool
) -> dict[str, Any] | None:
    """Returns the final metrics of a run that has nothing left to do, and says so; None if there is something."""
    final, wanted = directory.read_final(), config.trainer.train_steps
    if final is None or final["step"] != step or step < wanted or (evaluates and not final["metrics"]):
        return None
    _LOG.info("nothing to do: %s was finished at step %d; raise trainer.train_steps to train on", directory.path, step)
    return dict(final["metrics"]) if evaluates else {}


def conclude(
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


def stopped(signals: StopSignals, trainer: Any) -> bool:
    """Whether the run has stopped early; several workers do so together, or finish together."""
    agreed = getattr(trainer, "stop_agreed", None)
    return signals.received is not None if agreed is None else bool(agreed)


def _raise_if_stopped(signals: StopSignals, trainer: Any) -> None:
    stopped_by = signals.received
    if stopped(signals, trainer):
        step = int(trainer.global_step.numpy())
        kind = InterruptedRunError if stopped_by == SIGINT else PreemptedError
        who = stopped_by.name if stopped_by else "another worker, which was asked to"
        raise kind(f"stopped by {who} at step {step}; the same command goes on from the last checkpoint")
