"""Reads the state, config and metrics of a run from its files, for tables of many runs.

It reads local files only, without TensorFlow, and writes nothing. Files that are missing, damaged
or from another program are never an error: the summary says so.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from trainer_kit import __version__, files
from trainer_kit.config.serialize import parse_params
from trainer_kit.config.sources.layer import join_keys
from trainer_kit.errors import ConfigError
from trainer_kit.evals.ledger import active_records, read_records
from trainer_kit.process.run_lock import (
    HEARTBEAT,
    Heartbeat,
    is_process_alive,
    read_heartbeat,
)
from trainer_kit.telemetry.metrics_jsonl import read_active_history, read_last_report
from trainer_kit.telemetry.scalars import LOSS, flatten_scalars

# The ledger of the training run. The others are those of sidecars and of mode eval.
VALIDATION = "validation.jsonl"

# The states of a run that has ended as it should.
FINISHED = "finished"
STOPPED_EARLY = "stopped early"

_RUN_FILES = (
    "params.yaml",
    "manifest.json",
    "metrics.jsonl",
    "final.json",
    HEARTBEAT,
    "evals/*.jsonl",
    "ckpt-*.index",
)
# What the phase of a living process is called. All other phases are called "running".
_PHASE_STATES = {"start": "starting", "wait": "waiting"}
# The time of four beats.
_SILENT_SECONDS = 20.0
# How a config shows a section, where another config has a plain value.
_SECTION = "(set)"


class Point(NamedTuple):
    """The value of a metric at a step."""

    step: int
    value: float


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The state, config and metrics of a run, as read from its files.

    Attributes:
      folder: The folder.
      state: `starting`, `running`, `waiting`, `silent`, `killed`, `stopped`, `failed`, `stopped
        early`, `finished`, `unknown`, or for a folder without a run `empty` or `not a run`.
      damage: Which files cannot be read, as short sentences.
      remarks: What else is unusual, such as why the run ended early, as short sentences.
      config: The name of the experiment and the values of params.yaml by dotted path.
      step: The last step that a file tells. None if no file does.
      total_steps: The last step of the run. None if it is not known.
      metric: The metric that decides what is best. "" if the run has none.
      comparison: "higher" or "lower": which value of `metric` is better.
      evaluations: The evaluations that count, as the curve of each metric by name.
      training: The metrics of the last report of training.
      steps_per_second, examples_per_second: The rates of that report.
      updated: When its process last gave a sign of life.
    """

    folder: Path
    state: str
    damage: Sequence[str] = ()
    remarks: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    total_steps: int | None = None
    metric: str = ""
    comparison: str = "higher"
    evaluations: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    training: Mapping[str, float] = field(default_factory=dict)
    steps_per_second: float | None = None
    examples_per_second: float | None = None
    updated: datetime | None = None

    def read_curve(self, metric: str) -> Sequence[Point]:
        """Returns the values of a metric: the loss of training, or any metric of evaluations."""
        # Without a loss in the last report, the history has none or cannot be read.
        if metric != LOSS or LOSS not in self.training:
            return self.evaluations.get(metric, ())
        points = []
        for report in read_active_history(self.folder / "metrics.jsonl"):
            metrics = report["metrics"]
            if report["kind"] == "train" and metric in metrics:
                point = Point(report["step"], metrics[metric])
                points.append(point)
        return points


def find_best(curve: Sequence[Point], comparison: str) -> Point | None:
    """Returns the first of the best finite values of a curve, None if there is none."""
    finite_points = [point for point in curve if math.isfinite(point.value)]
    choose = max if comparison == "higher" else min
    return choose(finite_points, key=attrgetter("value"), default=None)


def is_run_folder(folder: Path) -> bool:
    """Whether the folder has any of the files that a run writes."""
    return any(any(folder.glob(pattern)) for pattern in _RUN_FILES)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the folders of the runs in `folder`, in the order of their names.

    `folder` may be the folder of a run itself. Hidden folders are left out.
    """
    for name, inner_names, _ in os.walk(folder):
        path = Path(name)
        visible_names = [inner for inner in inner_names if not inner.startswith(".")]
        inner_names[:] = sorted(visible_names)
        if is_run_folder(path):
            # What is in a run belongs to it.
            inner_names.clear()
            yield path


def read_run(folder: Path) -> RunSummary:
    """Returns what the files in `folder` tell, also if it is not the folder of a run."""
    damage: list[str] = []
    try:
        if is_run_folder(folder):
            return _read_files(folder, damage)
        state = "not a run" if os.listdir(folder) else "empty"
        return RunSummary(folder=folder, state=state)
    except Exception as error:
        # A folder or a value of another type may be in the place of any file or value.
        kind = type(error).__name__
        damage.append(f"its files cannot be read ({kind}: {error})")
        return RunSummary(folder=folder, state="unknown", damage=damage)


def read_params(path: Path) -> dict[str, Any] | None:
    """Returns the sections in a params.yaml, None if it is missing or damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        params: dict[str, Any] = parse_params(text).values
    except (OSError, ValueError, ConfigError):
        return None
    return params


def flatten_config(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the values of nested sections by dotted path.

    A section itself also has an entry, so that it differs from a plain value in its place.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner_path = join_keys(path, name)
        if isinstance(value, dict) and value:
            flat[inner_path] = _SECTION
            inner_values = flatten_config(value, inner_path)
            flat.update(inner_values)
        else:
            flat[inner_path] = value
    return flat


def _read_files(folder: Path, damage: list[str]) -> RunSummary:
    records: dict[str, Any] = {
        "params.yaml": read_params(folder / "params.yaml"),
        "manifest.json": files.read_json(folder / "manifest.json"),
        "final.json": files.read_json(folder / "final.json"),
        HEARTBEAT: read_heartbeat(folder),
    }
    for name, record in records.items():
        path = folder / name
        if record is None and path.exists():
            damage.append(f"{name} is damaged")
    params = records["params.yaml"] or {}
    manifest = records["manifest.json"] or {}
    final = records["final.json"] or {}
    heartbeat: Heartbeat | None = records[HEARTBEAT]
    state = _find_state(folder, heartbeat, final)
    evaluations = _read_evaluations(folder / "evals", damage)
    report = read_last_report(folder / "metrics.jsonl", "train") or {}

    remarks = []
    packages = manifest.get("packages", {})
    version = packages.get("trainer_kit", __version__)
    if version != __version__:
        remarks.append(f"written by trainer_kit {version}")
    if not params and not damage and state != "starting":
        remarks.append("it has no config (params.yaml)")
    if "stopped" in final:
        remarks.append(str(final["stopped"]))
    if any(folder.glob("diverged/step-*.json")):
        remarks.append("it has diverged; the reports are in its folder diverged")

    config = flatten_config(params)
    if "experiment" in manifest:
        config = {"experiment": manifest["experiment"], **config}
    training = report.get("metrics", {})
    trainer = params.get("trainer", {})
    metric = trainer.get("best_checkpoint_eval_metric")
    comparison = trainer.get("best_checkpoint_metric_comp", "higher")
    if not isinstance(metric, str) or not metric or comparison not in ("higher", "lower"):
        # A run that keeps no best is measured by its loss.
        metric = "validation_loss" if "validation_loss" in evaluations else LOSS
        comparison = "lower"
    updated = None
    if heartbeat is not None:
        # A damaged time does not hide the other values.
        with contextlib.suppress(ValueError):
            updated = datetime.fromisoformat(heartbeat["beat"])
    # A heartbeat may be older than the last report.
    sources = [final, report, heartbeat or {}]
    steps = [int(source["step"]) for source in sources if "step" in source]
    return RunSummary(
        folder=folder,
        state=state,
        damage=damage,
        remarks=remarks,
        config=config,
        step=max(steps, default=None),
        # The manifest has the steps that a number of epochs has become.
        total_steps=manifest.get("train_steps"),
        metric=metric,
        comparison=comparison,
        evaluations=evaluations,
        training=training,
        steps_per_second=report.get("steps_per_second"),
        examples_per_second=report.get("examples_per_second"),
        updated=updated,
    )


def _read_evaluations(folder: Path, damage: list[str]) -> dict[str, list[Point]]:
    """Returns the curves of the first ledger with evaluations: the training run's if it has any."""
    curves: dict[str, list[Point]] = {}
    paths = sorted(folder.glob("*.jsonl"))
    paths.sort(key=lambda path: path.name != VALIDATION)
    for path in paths:
        records = read_records(path)
        size = path.stat().st_size
        if size > 0 and not records:
            damage.append(f"evals/{path.name} has no readable line")
        for record in active_records(records):
            metrics = flatten_scalars(record["metrics"], "|")
            for name, value in metrics.items():
                point = Point(record["step"], value)
                curve = curves.setdefault(name, [])
                curve.append(point)
        if curves:
            break
    return curves


def _find_state(folder: Path, heartbeat: Heartbeat | None, final: Mapping[str, Any]) -> str:
    ending = STOPPED_EARLY if "stopped" in final else FINISHED
    if heartbeat is None:
        return ending if final else "unknown"
    # A refused start does not change a finished run.
    was_refused = heartbeat["ended"] == "failed" and heartbeat["phase"] == "start"
    if was_refused and final:
        return ending
    if heartbeat["ended"] in ("stopped", "failed"):
        return heartbeat["ended"]
    if heartbeat["ended"]:
        return ending

    # The process table of another machine cannot be read.
    is_here = heartbeat["host"] == socket.gethostname()
    if is_here and not is_process_alive(heartbeat["pid"]):
        return "killed"
    # The file system's clock counts, since that of another machine may differ.
    beat_seconds = os.path.getmtime(folder / HEARTBEAT)
    silent_seconds = time.time() - beat_seconds
    phase_state = _PHASE_STATES.get(heartbeat["phase"], "running")
    return phase_state if silent_seconds < _SILENT_SECONDS else "silent"
