"""What the files of a run tell somebody who looks at it from outside: its state, without TensorFlow.

Whatever is missing, half written or not ours is left out: a run that begins, or was written by another version, is
looked at all the same. Nothing is written.
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
from trainer_kit.config.schema.evaluation import BestCheckpointConfig
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError, StorageError, UsageError, suggestion
from trainer_kit.evals.best.criterion import Criterion
from trainer_kit.process.run_lock import HEARTBEAT, LOCK
from trainer_kit.telemetry.metrics_jsonl import newest_report

LEASE = ".lease.json"
_LISTED = 12  # names in a message
_RUN_FILES = ("params.yaml", "manifest.json", "metrics.jsonl", "final.json", "attempts.jsonl", "evals", HEARTBEAT, LOCK)


@dataclass(frozen=True)
class Settings:
    """What params.yaml tells a viewer; what it does not is the default of the config.

    Attributes:
      train_steps: up to which it trains; None if that is not known.
      metric: that decides what is best; "" if nothing does.
      comparison: "higher" or "lower", what is better.
      best_folder: name of the folder of the best checkpoint; "" if there is none.
      named: what else is kept, by name.
    """

    train_steps: int | None
    metric: str
    comparison: str
    best_folder: str
    named: Mapping[str, Criterion] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """What a trainer or a sidecar tells of itself again and again.

    Attributes:
      host, pid: where it runs; "" and None when it does not tell.
      phase: what it is doing.
      step: where a trainer is, or what a sidecar reads; None when it does not tell.
      beat: changes while it lives.
      ended: "" while it lives; else how it ended.
      written: when the file was written, in seconds of the clock of the machine that has the disk.
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
    """The last report of a training loop; metrics in groups are named "group/name"."""

    step: int
    metrics: Mapping[str, float]
    steps_per_second: float | None


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and of its sidecars.

    Attributes:
      settings: what params.yaml tells.
      trainer: None before its first heartbeat.
      report: None before the first one.
      checkpoint: the newest one's name; "" if there is none.
      sidecars: by name; None for one that tells nothing of itself.
      finished: the step that the run has ended with; None while it has not.
      stopped: why it has ended before the last of its steps; "" if it has not.
    """

    settings: Settings
    trainer: Process | None
    report: TrainReport | None
    checkpoint: str
    sidecars: Mapping[str, Process | None]
    finished: int | None
    stopped: str = ""


def open_run(model_dir: str, may_be_empty: bool = False) -> Path:
    """Returns the folder of a run that is to be looked at.

    Raises:
      UsageError: when it is no folder, or holds no run, with what there is instead.
    """
    if files.is_remote(model_dir):
        raise UsageError(f"MODEL_DIR: {model_dir!r} is a remote folder; give the path that it is mounted at")
    folder = Path(model_dir)
    with readable(folder):
        if not folder.exists():
            raise UsageError(f"MODEL_DIR: there is no folder {model_dir}; {_beside(folder)}")
        if not folder.is_dir():
            raise UsageError(f"MODEL_DIR: {model_dir} is a file; give the folder of a run")
        there = sorted(os.listdir(folder))
        if holds_run(folder) or (may_be_empty and not there):
            return folder
        runs = [str(path) for path in _folders(folder) if holds_run(path)]
    inside = f"runs in it: {', '.join(runs[:_LISTED])}" if runs else f"it holds: {listed(there)}"
    raise UsageError(f"MODEL_DIR: {model_dir} holds no run; {inside}")


def listed(names: Iterable[str]) -> str:
    """Returns the first of `names`, sorted, for a message; "nothing" if there is none."""
    return ", ".join(sorted(names)[:_LISTED]) or "nothing"


def holds_run(folder: Path) -> bool:
    """Whether there is any file that a run writes."""
    return any((folder / name).exists() for name in _RUN_FILES) or bool(complete_checkpoints(os.fspath(folder)))


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Tells as StorageError that `path` cannot be read."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def read_settings(folder: Path) -> Settings:
    """Returns what params.yaml tells; a value that is missing or of the wrong kind is the config's default."""
    try:
        text = (folder / "params.yaml").read_text(encoding="utf-8")
        values: Any = yaml_loader.parse(text, "params.yaml", own=True).values
    except (OSError, ValueError, ConfigError):
        values = None
    trainer = values.get("trainer") if isinstance(values, dict) else None
    told = trainer if isinstance(trainer, dict) else {}
    plain = TrainerConfig()
    steps, comparison = told.get("train_steps"), told.get("best_checkpoint_metric_comp")
    metric, best = told.get("best_checkpoint_eval_metric"), told.get("best_checkpoint_export_subdir")
    return Settings(
        train_steps=steps if isinstance(steps, int) and steps >= 0 else None,
        metric=metric if isinstance(metric, str) else plain.best_checkpoint_eval_metric,
        comparison=comparison if comparison in ("higher", "lower") else plain.best_checkpoint_metric_comp,
        best_folder=best if isinstance(best, str) else plain.best_checkpoint_export_subdir,
        named=_named_bests(told.get("best_checkpoints")),
    )


def _named_bests(told: Any) -> dict[str, Criterion]:
    found = {}
    for name, values in told.items() if isinstance(told, dict) else ():
        with contextlib.suppress(ValueError, TypeError):  # a FieldError is a ValueError
            one = BestCheckpointConfig(**values)
            found[str(name)] = Criterion(one.metric, one.metric_comp, one.keep, one.min_delta)
    return found


def read_status(folder: Path) -> RunStatus:
    """Returns the state of the run in `folder` as its files tell it now.

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
    """Returns what the heartbeat or lease at `path` tells; None when there is none, or it is not whole."""
    told = files.read_json(path)
    try:
        written = path.stat().st_mtime
    except OSError:
        return None
    if told is None:
        return None
    pid, step, ended = told.get("pid"), told.get("step"), told.get("ended")
    return Process(
        host=str(told.get("host") or ""),
        pid=pid if isinstance(pid, int) and pid > 0 else None,
        phase=str(told.get("phase") or ""),
        step=step if isinstance(step, int) else None,
        beat=str(told.get("beat")),
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
    """Names of all that evaluates beside the run: what has a lease, a ledger or a folder of its own."""
    leases = [path.name.removesuffix(LEASE) for path in (folder / "evals").glob(f"*{LEASE}")]
    ledgers = [path.stem for path in (folder / "evals").glob("*.jsonl")]
    return sorted({*leases, *ledgers, *(path.name for path in _folders(folder / "evals"))} - {"validation", "eval", ""})


def _beside(missing: Path) -> str:
    """What there is in place of a folder that is missing."""
    parent = missing.parent
    if not parent.is_dir():
        return f"nor is there {parent}"
    return f"in {parent}: {suggestion(missing.name, [path.name for path in _folders(parent)])}"


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []  # there is none, or it is none of ours
