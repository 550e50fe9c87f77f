"""Reads the state of a run from its files, from outside the run and without TensorFlow.

Files that are missing, half written or foreign are left out, so that a run that has just begun, or was written by
another version, can be read too. Nothing is written.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.durations import unit_of
from trainer_kit.config.schema.evaluation import BestCheckpointConfig
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError, StorageError, UsageError, path_suggestion
from trainer_kit.evals.best.criterion import Criterion
from trainer_kit.process.run_directory import steps_of_run
from trainer_kit.process.run_lock import HEARTBEAT, LOCK
from trainer_kit.telemetry.metrics_jsonl import newest_report

LEASE = ".lease.json"
_LISTED = 12  # most names in a message
_RUN_FILES = ("params.yaml", "manifest.json", "metrics.jsonl", "final.json", "attempts.jsonl", "evals", HEARTBEAT, LOCK)


@dataclass(frozen=True)
class Settings:
    """The settings in params.yaml that a viewer needs; missing ones have the config's defaults.

    Attributes:
      train_steps: The last step of training; None if it is not known.
      metric: The metric that decides what is best; "" if there is none.
      comparison: "higher" or "lower": which value is better.
      best_folder: The name of the best checkpoint's folder; "" if there is none.
      named: The criteria of trainer.best_checkpoints by name.
    """

    train_steps: int | None
    metric: str
    comparison: str
    best_folder: str
    named: Mapping[str, Criterion] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """The content of a trainer's heartbeat or a sidecar's lease.

    Attributes:
      host, pid: Where the process runs; "" and None if the file does not say.
      phase: What the process is doing.
      step: The trainer's step, or the step that a sidecar reads; None if the file does not say.
      beat: A text that changes while the process lives.
      ended: "" while the process lives, else how it ended.
      written: When the file was written, in seconds of the file system's clock.
    """

    host: str
    pid: int | None
    phase: str
    step: int | None
    beat: str
    ended: str
    written: float


@dataclass(frozen=True)
class TrainReport:
    """The last report of a training loop; a metric in a group is named "group/name"."""

    step: int
    metrics: Mapping[str, float]
    steps_per_second: float | None


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and of its sidecars.

    Attributes:
      settings: The settings in params.yaml.
      trainer: The trainer's heartbeat; None before the first one.
      report: The last training report; None before the first one.
      checkpoint: The name of the newest checkpoint; "" if there is none.
      sidecars: Each sidecar's lease by the sidecar's name; None for a sidecar without one.
      finished: The step at which the run finished; None if it has not finished.
      stopped: Why the run finished before its last step; "" if it did not.
    """

    settings: Settings
    trainer: Process | None
    report: TrainReport | None
    checkpoint: str
    sidecars: Mapping[str, Process | None]
    finished: int | None
    stopped: str = ""


def open_run(model_dir: str, may_be_empty: bool = False) -> Path:
    """Returns `model_dir` as a path, after checking that it is the folder of a run.

    Raises:
      UsageError: when it is not a folder or holds no run; the message says what it holds.
    """
    if files.is_remote(model_dir):
        raise UsageError(f"MODEL_DIR: {model_dir!r} is a remote folder; give the path that it is mounted at")
    folder = Path(model_dir)
    with readable(folder):
        if not folder.exists():
            folders = [path.name for path in _folders(folder.parent)]
            raise UsageError(
                f"MODEL_DIR: there is no folder {model_dir}; {path_suggestion(folder, folders, 'folders')}"
            )
        if not folder.is_dir():
            raise UsageError(f"MODEL_DIR: {model_dir} is a file; give the folder of a run")
        there = sorted(os.listdir(folder))
        if holds_run(folder) or (may_be_empty and not there):
            return folder
        runs = [str(path) for path in _folders(folder) if holds_run(path)]
    inside = f"runs in it: {', '.join(runs[:_LISTED])}" if runs else f"it holds: {listed(there)}"
    raise UsageError(f"MODEL_DIR: {model_dir} holds no run; {inside}")


def listed(names: Iterable[str]) -> str:
    """Returns the first `names` in sorted order, for a message; "nothing" if there are none."""
    return ", ".join(sorted(names)[:_LISTED]) or "nothing"


def holds_run(folder: Path) -> bool:
    """Whether the folder has any of the files that a run writes."""
    return any((folder / name).exists() for name in _RUN_FILES) or bool(complete_checkpoints(os.fspath(folder)))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError which says that `path` cannot be read."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def read_settings(folder: Path) -> Settings:
    """Returns the settings in params.yaml; a missing or malformed value gets the default of the config."""
    try:
        text = (folder / "params.yaml").read_text(encoding="utf-8")
        values: Any = yaml_loader.parse(text, "params.yaml", own=True).values
    except (OSError, ValueError, ConfigError):
        values = None
    trainer = values.get("trainer") if isinstance(values, dict) else None
    recorded = trainer if isinstance(trainer, dict) else {}
    plain = TrainerConfig()
    steps, comparison = recorded.get("train_steps"), recorded.get("best_checkpoint_metric_comp")
    steps = steps_of_run(steps, folder) if unit_of(steps) else steps
    metric, best = recorded.get("best_checkpoint_eval_metric"), recorded.get("best_checkpoint_export_subdir")
    return Settings(
        train_steps=steps if isinstance(steps, int) and steps >= 0 else None,
        metric=metric if isinstance(metric, str) else plain.best_checkpoint_eval_metric,
        comparison=comparison if comparison in ("higher", "lower") else plain.best_checkpoint_metric_comp,
        best_folder=best if isinstance(best, str) else plain.best_checkpoint_export_subdir,
        named=_named_bests(recorded.get("best_checkpoints")),
    )


def _named_bests(recorded: Any) -> dict[str, Criterion]:
    found = {}
    for name, values in recorded.items() if isinstance(recorded, dict) else ():
        with contextlib.suppress(ValueError, TypeError):  # a FieldError is a ValueError
            one = BestCheckpointConfig(**values)
            found[str(name)] = Criterion(one.metric, one.metric_comp, one.keep, one.min_delta)
    return found


def read_status(folder: Path) -> RunStatus:
    """Returns the current state of the run in `folder`, read from its files.

    Raises:
      StorageError: when the folder, or metrics.jsonl in it, cannot be read.
    """
    with readable(folder):
        checkpoints = complete_checkpoints(os.fspath(folder))
    final = files.read_json(folder / "final.json") or {}
    step, stopped = final.get("step"), final.get("stopped")
    return RunStatus(
        settings=read_settings(folder),
        trainer=read_process(folder / HEARTBEAT),
        report=_read_report(folder / "metrics.jsonl"),
        checkpoint=f"ckpt-{max(checkpoints)}" if checkpoints else "",
        sidecars={name: read_process(folder / "evals" / f"{name}{LEASE}") for name in _sidecar_names(folder)},
        finished=step if isinstance(step, int) else None,
        stopped=stopped if isinstance(stopped, str) else "",
    )


def read_process(path: Path) -> Process | None:
    """Returns the content of the heartbeat or lease at `path`; None if the file is missing or incomplete."""
    recorded = files.read_json(path)
    try:
        written = path.stat().st_mtime
    except OSError:
        return None
    if recorded is None:
        return None
    pid, step, ended = recorded.get("pid"), recorded.get("step"), recorded.get("ended")
    return Process(
        host=str(recorded.get("host") or ""),
        pid=pid if isinstance(pid, int) and pid > 0 else None,
        phase=str(recorded.get("phase") or ""),
        step=step if isinstance(step, int) else None,
        beat=str(recorded.get("beat")),
        ended=ended if isinstance(ended, str) else "done" if ended else "",
        written=written,
    )


def _read_report(path: Path) -> TrainReport | None:
    report: dict[str, Any] | None = newest_report(path, "train")
    if report is None:
        return None
    rate = report.get("steps_per_second")
    return TrainReport(report["step"], report["metrics"], rate if rate is not None and math.isfinite(rate) else None)


def _sidecar_names(folder: Path) -> list[str]:
    """Returns the names of the run's sidecars: each has a lease, a ledger or a folder."""
    leases = [path.name.removesuffix(LEASE) for path in (folder / "evals").glob(f"*{LEASE}")]
    ledgers = [path.stem for path in (folder / "evals").glob("*.jsonl")]
    return sorted({*leases, *ledgers, *(path.name for path in _folders(folder / "evals"))} - {"validation", "eval", ""})


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []  # the folder does not exist or cannot be read
