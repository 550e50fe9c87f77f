"""Reads the evaluations of a run from outside: the ledgers, the best evaluations, and where their weights are."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint_names import parse_checkpoint_name
from trainer_kit.cli.view.run_status import Settings, explain_read_errors, format_names
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.evals.best.criterion import Criterion, ScoredEvaluation
from trainer_kit.evals.best.info_json import INFO, read_info
from trainer_kit.evals.ledger import REWIND, active_records, read_records
from trainer_kit.telemetry.scalars import as_scalar, flatten_scalars

VALIDATION, EVAL = (
    "validation",
    "eval",
)  # the ledgers of training runs and of mode eval; the others are sidecars'


@dataclass(frozen=True)
class RecordedEvaluation:
    """One evaluation in a ledger.

    Attributes:
      step: The global step of the weights.
      dataset: The name of the validation set; "" if the ledger has none.
      metrics: The metrics; nested names are joined by "|".
      seconds: The duration, if the ledger has it.
      checkpoint: The checkpoint with the weights, relative to the run's folder; "" if they were not
        saved.
      lineage: How often the run had been rewound.
      is_active: Whether the evaluation counts, because no later lineage began before it.
    """

    step: int
    dataset: str
    metrics: Mapping[str, float]
    seconds: float | None
    checkpoint: str
    lineage: int
    is_active: bool


@dataclass(frozen=True)
class MetricChoice:
    """What makes an evaluation the best: the metric, and whether a "higher" or a "lower" value is better."""

    metric: str
    comparison: str


def add_metric_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the metric and the comparison that decide which evaluation is best."""
    parser.add_argument(
        "--metric",
        help=(
            "The metric that decides what is best. Default: the run's best_checkpoint_eval_metric."
        ),
    )
    parser.add_argument(
        "--comparison",
        choices=["higher", "lower"],
        help="Whether a higher or a lower value of the metric is better.",
    )


def choose_metric(
    metric: str | None,
    comparison: str | None,
    settings: Settings,
    evaluations: Iterable[RecordedEvaluation],
) -> MetricChoice | None:
    """Returns the criterion that was asked for, or else the run's own; None when the run has none.

    Raises:
      UsageError: when no evaluation has the metric that was asked for, or the metric or the
        comparison is missing.
    """
    if metric:
        check_metric(metric, evaluations, "--metric")
    if not (name := metric or settings.metric):
        if comparison:
            raise UsageError(
                "--comparison: needs --metric too, because the run keeps no best checkpoint"
            )
        return None
    known = comparison or (settings.comparison if name == settings.metric else None)
    if known is None:
        raise UsageError(
            f"--metric: is a higher or a lower {name!r} better? Give --comparison=higher or"
            " lower too"
        )
    return MetricChoice(name, known)


def list_ledger_names(folder: Path) -> list[str]:
    """Returns the <name> of each file evals/<name>.jsonl, the training run's ledger first."""
    names = sorted(path.stem for path in (folder / "evals").glob("*.jsonl") if path.is_file())
    return sorted(names, key=lambda name: name != VALIDATION)


def require_ledgers(folder: Path, name: str | None) -> list[str]:
    """Returns the names of all ledgers, or [name] if a name is given.

    Raises:
      UsageError: when there is no ledger, or none with that name.
    """
    names = list_ledger_names(folder)
    if not names:
        raise UsageError(
            f"{folder} has no evaluations (evals/<name>.jsonl); it holds:"
            f" {format_names(os.listdir(folder))}"
        )
    if name is None:
        return names
    if name not in names:
        raise UsageError(
            f"--name: {folder / 'evals'} has no ledger {name!r}; {suggest_names(name, names)}"
        )
    return [name]


def read_evaluations(folder: Path, name: str) -> list[RecordedEvaluation]:
    """Returns the evaluations in the ledger `name`, in its order; [] if the file does not exist.

    Raises:
      StorageError: when the ledger cannot be read.
    """
    with explain_read_errors(path := folder / "evals" / f"{name}.jsonl"):
        records = read_records(path)
    numbered = [{**record, "line": number} for number, record in enumerate(records)]
    active = {record["line"] for record in active_records(numbered)}
    return [
        _parse_evaluation(item, item["line"] in active)
        for item in numbered
        if item.get("kind") != REWIND
    ]


def metric_names(evaluations: Iterable[RecordedEvaluation]) -> list[str]:
    """Returns the names of all metrics, in the order in which they first appear."""
    return list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))


def check_metric(metric: str, evaluations: Iterable[RecordedEvaluation], origin: str) -> None:
    """Raises UsageError, which suggests near names or lists all, when no evaluation has this metric."""
    names = metric_names(evaluations)
    if metric not in names:
        raise UsageError(f"{origin}: no evaluation has {metric!r}; {suggest_names(metric, names)}")


def rank_evaluations(
    evaluations: Iterable[RecordedEvaluation], choice: MetricChoice
) -> dict[str, list[RecordedEvaluation]]:
    """Returns a dict from dataset to active evaluations, best first, one per step; ties keep the ledger's order.

    Values that are not finite are left out. Values on different datasets are not compared.
    """
    values = [
        (one, one.metrics.get(choice.metric, math.nan)) for one in evaluations if one.is_active
    ]
    candidates = [(one, value) for one, value in values if math.isfinite(value)]
    found: dict[str, dict[int, RecordedEvaluation]] = {one.dataset: {} for one, _ in candidates}
    for one, _ in sorted(
        candidates, key=lambda pair: -pair[1] if choice.comparison == "higher" else pair[1]
    ):
        found[one.dataset].setdefault(one.step, one)
    return {dataset: list(of.values()) for dataset, of in found.items()}


def find_best_dir(folder: Path, settings: Settings, name: str) -> Path | None:
    """Returns the folder of the best weights of the ledger `name`; None if none are kept. Each sidecar has its own."""
    own = folder if name == VALIDATION else folder / "evals" / name
    return own / settings.best_folder if settings.best_folder and name != EVAL else None


def get_named_best_dir(folder: Path, name: str, best_name: str) -> Path:
    """Returns the folder of the best weights that the ledger `name` keeps under the name `best_name`."""
    return (
        (folder if name == VALIDATION else folder / "evals" / name) / BEST_CHECKPOINTS / best_name
    )


def select_kept_evaluations(
    evaluations: Iterable[RecordedEvaluation], criterion: Criterion
) -> dict[str, list[RecordedEvaluation]]:
    """Returns a dict from dataset to the active evaluations that a run keeps by `criterion`, best first."""
    found: dict[str, list[ScoredEvaluation]] = {}
    for one in evaluations:
        scored = criterion.score(one.step, one.metrics, one) if one.is_active else None
        if scored is not None:
            found.setdefault(one.dataset, []).append(scored)
    return {
        of: [one.record for one in criterion.sort_best_first(criterion.fold(scored))]
        for of, scored in found.items()
    }


def find_weights(
    evaluation: RecordedEvaluation, folder: Path, best_dirs: Sequence[Path]
) -> Path | None:
    """Returns the checkpoint prefix (a path without suffix) of an evaluation's weights; None if they are gone.

    Args:
      evaluation: An evaluation of a ledger.
      folder: The run's folder.
      best_dirs: Folders of best weights, which are searched first.
    """
    name = f"ckpt-{evaluation.step}"
    noted = [folder / evaluation.checkpoint] if evaluation.checkpoint else []
    return next(
        (
            place
            for place in (*(one / name for one in best_dirs), *noted, folder / name)
            if _has_all_files(place)
        ),
        None,
    )


def format_checkpoint_cell(evaluation: RecordedEvaluation, folder: Path) -> str:
    """Returns the recorded checkpoint of an evaluation; "gone" when the run no longer has it, "" without one."""
    recorded = evaluation.checkpoint
    return "gone" if recorded and not _has_all_files(folder / recorded) else recorded


def compare_with_info(
    best: Iterable[RecordedEvaluation], choice: MetricChoice, best_dir: Path
) -> tuple[bool | None, str]:
    """Returns whether info.json in `best_dir` names one of `best` (None if they are not comparable), and a sentence.

    Args:
      best: The best evaluation of each dataset.
      choice: The criterion by which they are the best.
      best_dir: The folder of the best weights.
    """
    info = read_info(os.fspath(best_dir), quiet=True)
    if info is None:
        return (
            (False, f"{INFO} is damaged")
            if (best_dir / INFO).exists()
            else (None, f"there is no {INFO}")
        )
    said = f"step {info['step']}, {info['metric']} {info['value']!r}"
    if info["metric"] != choice.metric:
        return None, f"{INFO} uses another metric: {said}"
    if (info["step"], info["value"]) in [(one.step, one.metrics[choice.metric]) for one in best]:
        return True, f"{INFO} agrees: {said}"
    return False, f"{INFO} differs: {said}"


def _parse_evaluation(record: Mapping[str, Any], is_active: bool) -> RecordedEvaluation:
    seconds = record.get("seconds")
    return RecordedEvaluation(
        step=record["step"],
        dataset=str(record.get("dataset") or ""),
        metrics=flatten_scalars(record["metrics"], "|"),
        seconds=as_scalar(seconds),
        checkpoint=str(record.get("checkpoint") or ""),
        lineage=record["lineage"],
        is_active=is_active,
    )


def _has_all_files(prefix: Path) -> bool:
    """Whether the index and all data files of a checkpoint exist; their content is not checked."""
    names = [
        path.name
        for path in prefix.parent.glob(f"{prefix.name}.*")
        if parse_checkpoint_name(path.name) == prefix.name
    ]
    parts = [
        match for name in names if (match := re.fullmatch(r".*-\d+\.data-\d{5}-of-(\d{5})", name))
    ]
    return f"{prefix.name}.index" in names and len(parts) == max(
        (int(part[1]) for part in parts), default=-1
    )
