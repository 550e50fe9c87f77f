"""Reads the evaluations of a run from outside.

It finds the ledgers, the best evaluations and their weights.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_kit.checkpoint_names import parse_checkpoint_name
from trainer_kit.cli.view.run_status import explain_read_errors, format_names
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.evals.best.criterion import Criterion, ScoredEvaluation, guess_comparison
from trainer_kit.evals.ledger import REWIND, active_records, read_records
from trainer_kit.telemetry.scalars import as_scalar, flatten_scalars

# The ledgers of training runs and of mode eval. The others are those of sidecars.
VALIDATION = "validation"
EVAL = "eval"


@dataclass(frozen=True)
class RecordedEvaluation:
    """One evaluation in a ledger.

    Attributes:
      step: The global step of the weights.
      dataset: The name of the validation set. "" if the ledger has none.
      metrics: The metrics. Nested names are joined by "|".
      seconds: The duration, if the ledger has it.
      checkpoint: The checkpoint with the weights, relative to the run's folder. "" if they were not
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
    """What makes an evaluation the best.

    Attributes:
      metric: The name of the metric.
      comparison: Whether a "higher" or a "lower" value is better.
    """

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
    own_choice: MetricChoice,
    names: Sequence[str],
) -> MetricChoice | None:
    """Returns the criterion that was asked for, or else the run's own.

    Args:
      metric, comparison: What was asked for. None for what was not.
      own_choice: The criterion of the run. Its metric is "" when it has none.
      names: The names of the metrics that were recorded.

    Returns:
      The criterion. None when there is none.

    Raises:
      UsageError: when no evaluation has the metric that was asked for, the metric is missing, or
        its name does not tell which values are better.
    """
    if metric:
        check_metric(metric, names, "--metric")
    if not (name := metric or own_choice.metric):
        if comparison:
            raise UsageError(
                "--comparison: needs --metric too, because the run keeps no best checkpoint"
            )
        return None

    # The run knows the comparison of its own metric only.
    default = guess_comparison(name)
    if name == own_choice.metric:
        default = own_choice.comparison
    chosen_comparison = comparison or default
    if chosen_comparison is None:
        raise UsageError(
            f"--metric: is a higher or a lower {name!r} better? Give --comparison=higher or"
            " lower too"
        )
    return MetricChoice(name, chosen_comparison)


def list_ledger_names(folder: Path) -> list[str]:
    """Returns the <name> of each file evals/<name>.jsonl, the training run's ledger first."""
    paths = (folder / "evals").glob("*.jsonl")
    names = []
    for path in paths:
        if path.is_file():
            names.append(path.stem)
    names.sort(key=lambda name: (name != VALIDATION, name))
    return names


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
        evaluations_dir = folder / "evals"
        suggestion = suggest_names(name, names)
        raise UsageError(f"--name: {evaluations_dir} has no ledger {name!r}; {suggestion}")
    return [name]


def read_evaluations(folder: Path, name: str) -> list[RecordedEvaluation]:
    """Returns the evaluations in the ledger `name`, in its order, [] if the file does not exist.

    Raises:
      StorageError: when the ledger cannot be read.
    """
    path = folder / "evals" / f"{name}.jsonl"
    with explain_read_errors(path):
        records = read_records(path)
    # `active_records` returns copies. The numbers of the lines identify them.
    numbered_records = []
    for number, record in enumerate(records):
        numbered_record = {**record, "line": number}
        numbered_records.append(numbered_record)
    active_lines = {record["line"] for record in active_records(numbered_records)}

    evaluations = []
    for record in numbered_records:
        if record.get("kind") == REWIND:
            continue
        evaluation = RecordedEvaluation(
            step=record["step"],
            dataset=str(record.get("dataset") or ""),
            metrics=flatten_scalars(record["metrics"], "|"),
            seconds=as_scalar(record.get("seconds")),
            checkpoint=str(record.get("checkpoint") or ""),
            lineage=record["lineage"],
            is_active=record["line"] in active_lines,
        )
        evaluations.append(evaluation)
    return evaluations


def metric_names(evaluations: Iterable[RecordedEvaluation]) -> list[str]:
    """Returns the names of all metrics, in the order in which they first appear."""
    names: dict[str, None] = {}
    for evaluation in evaluations:
        names |= dict.fromkeys(evaluation.metrics)
    return list(names)


def check_metric(metric: str, names: Sequence[str], origin: str) -> None:
    """Raises UsageError when no evaluation has this metric.

    The message suggests near names or lists all.
    """
    if metric not in names:
        suggestion = suggest_names(metric, names)
        raise UsageError(f"{origin}: no evaluation has {metric!r}; {suggestion}")


def rank_evaluations(
    evaluations: Iterable[RecordedEvaluation], choice: MetricChoice
) -> dict[str, list[RecordedEvaluation]]:
    """Returns a dict from dataset to active evaluations, best first, one per step.

    Ties keep the ledger's order. Values that are not finite are left out. Values on different
    datasets are not compared.
    """
    # The datasets keep the ledger's order too.
    candidates: dict[str, list[RecordedEvaluation]] = {}
    for evaluation in evaluations:
        value = evaluation.metrics.get(choice.metric, math.nan)
        if evaluation.is_active and math.isfinite(value):
            ranking = candidates.setdefault(evaluation.dataset, [])
            ranking.append(evaluation)

    sign = -1 if choice.comparison == "higher" else 1
    rankings = {}
    for dataset, ranking in candidates.items():
        ranking.sort(key=lambda evaluation: sign * evaluation.metrics[choice.metric])
        best_by_step: dict[int, RecordedEvaluation] = {}
        for evaluation in ranking:
            best_by_step.setdefault(evaluation.step, evaluation)
        rankings[dataset] = list(best_by_step.values())
    return rankings


def find_best_dir(folder: Path, best_folder: str, name: str) -> Path | None:
    """Returns the folder of the best weights of a ledger, None if none are kept.

    Each sidecar has a separate one.

    Args:
      folder: The run's folder.
      best_folder: Its setting best_checkpoint_export_subdir.
      name: The name of the ledger.
    """
    if not best_folder or name == EVAL:
        return None
    output_dir = _get_output_dir(folder, name)
    return output_dir / best_folder


def get_named_best_dir(folder: Path, name: str, best_name: str) -> Path:
    """Returns the folder of the best weights that a ledger keeps under a name.

    Args:
      folder: The run's folder.
      name: The name of the ledger.
      best_name: The name of the best weights in trainer.best_checkpoints.
    """
    output_dir = _get_output_dir(folder, name)
    return output_dir / BEST_CHECKPOINTS / best_name


def _get_output_dir(folder: Path, name: str) -> Path:
    """Returns the folder of what the process that writes the ledger `name` writes besides."""
    if name == VALIDATION:
        return folder
    return folder / "evals" / name


def select_kept_evaluations(
    evaluations: Iterable[RecordedEvaluation], criterion: Criterion
) -> dict[str, list[RecordedEvaluation]]:
    """Returns the active evaluations that a run keeps by `criterion`, best first, by dataset."""
    scored_evaluations: dict[str, list[ScoredEvaluation]] = {}
    for evaluation in evaluations:
        if not evaluation.is_active:
            continue
        scored = criterion.score(evaluation.step, evaluation.metrics, evaluation)
        if scored is not None:
            candidates = scored_evaluations.setdefault(evaluation.dataset, [])
            candidates.append(scored)

    kept_evaluations: dict[str, list[RecordedEvaluation]] = {}
    for dataset, candidates in scored_evaluations.items():
        selected = criterion.fold(candidates)
        ranking = criterion.sort_best_first(selected)
        kept_evaluations[dataset] = [scored.record for scored in ranking]
    return kept_evaluations


def find_weights(
    evaluation: RecordedEvaluation, folder: Path, best_dirs: Sequence[Path]
) -> Path | None:
    """Returns the checkpoint prefix of an evaluation's weights, None if they are gone.

    A prefix is a path without suffix.

    Args:
      evaluation: An evaluation of a ledger.
      folder: The run's folder.
      best_dirs: Folders of best weights, which are searched first.
    """
    name = f"ckpt-{evaluation.step}"
    prefixes = [best_dir / name for best_dir in best_dirs]
    if evaluation.checkpoint:
        prefixes.append(folder / evaluation.checkpoint)
    prefixes.append(folder / name)
    for prefix in prefixes:
        if _has_all_files(prefix):
            return prefix
    return None


def format_checkpoint_cell(evaluation: RecordedEvaluation, folder: Path) -> str:
    """Returns the recorded checkpoint of an evaluation, "" without one.

    Returns "gone" when the run no longer has it.
    """
    checkpoint = evaluation.checkpoint
    if not checkpoint:
        return ""
    return checkpoint if _has_all_files(folder / checkpoint) else "gone"


def _has_all_files(prefix: Path) -> bool:
    """Whether the index and all data files of a checkpoint exist. Their content is not checked."""
    names = []
    part_counts = []
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        name = path.name
        if parse_checkpoint_name(name) != prefix.name:
            continue
        names.append(name)
        # The name of a data file ends with the number of data files.
        match = re.fullmatch(r".*-\d+\.data-\d{5}-of-(\d{5})", name)
        if match:
            part_counts.append(int(match[1]))

    expected_count = max(part_counts, default=-1)
    has_all_parts = len(part_counts) == expected_count
    index_name = f"{prefix.name}.index"
    return index_name in names and has_all_parts
