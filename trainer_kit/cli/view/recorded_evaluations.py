"""The evaluations of a run for those who look at it: what the ledgers hold, which are best, where their weights are."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint_names import owner
from trainer_kit.cli.view.run_status import Settings, listed, readable
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.evals.best.criterion import Criterion, Scored
from trainer_kit.evals.best.info_json import INFO, read_info
from trainer_kit.evals.ledger import REWIND, active_records, read_records
from trainer_kit.telemetry.scalars import as_scalar, flat_scalars

VALIDATION, EVAL = "validation", "eval"  # the ledgers of training runs and of mode eval; every other is a sidecar's


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
      step: global step of the weights.
      dataset: what they were evaluated on; "" if the ledger does not tell.
      metrics: nested names are joined by "|".
      seconds: how long it took, if the ledger tells.
      checkpoint: that held the weights, relative to the run's folder; "" if they were not saved.
      lineage: how often the run had been rewound.
      active: whether it counts: no later lineage began before it.
    """

    step: int
    dataset: str
    metrics: Mapping[str, float]
    seconds: float | None
    checkpoint: str
    lineage: int
    active: bool


@dataclass(frozen=True)
class Choice:
    """What makes an evaluation the best: the metric, and whether a "higher" or a "lower" value is better."""

    metric: str
    comparison: str


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Adds the metric and the comparison that decide what is best."""
    parser.add_argument("--metric", help="The metric that decides. Default: the run's best_checkpoint_eval_metric.")
    parser.add_argument("--comparison", choices=["higher", "lower"], help="Which value of the metric is better.")


def choose(
    metric: str | None, comparison: str | None, settings: Settings, evaluations: Iterable[Evaluation]
) -> Choice | None:
    """Returns what decides: what was asked for, or what the run itself goes by; None when it goes by nothing.

    Raises:
      UsageError: when no evaluation has the metric that was asked for, or only half of the choice is known.
    """
    if metric:
        check_metric(metric, evaluations)
    if not (name := metric or settings.metric):
        if comparison:
            raise UsageError("--comparison: by which metric? The run keeps no best checkpoint; give --metric too")
        return None
    known = comparison or (settings.comparison if name == settings.metric else None)
    if known is None:
        raise UsageError(f"--metric: is a higher or a lower {name!r} better? Give --comparison=higher or lower too")
    return Choice(name, known)


def ledger_names(folder: Path) -> list[str]:
    """Returns the names of the files evals/<name>.jsonl, that of the training run first."""
    names = sorted(path.stem for path in (folder / "evals").glob("*.jsonl") if path.is_file())
    return sorted(names, key=lambda name: name != VALIDATION)


def require_ledgers(folder: Path, name: str | None) -> list[str]:
    """Returns the names of all ledgers, or of the one that is asked for.

    Raises:
      UsageError: when there is none, or none of that name.
    """
    names = ledger_names(folder)
    if not names:
        raise UsageError(f"{folder} has no evaluations (evals/<name>.jsonl); it holds: {listed(os.listdir(folder))}")
    if name is None:
        return names
    if name not in names:
        raise UsageError(f"--name: {folder / 'evals'} has no ledger {name!r}; {suggestion(name, names)}")
    return [name]


def read_evaluations(folder: Path, name: str) -> list[Evaluation]:
    """Returns the evaluations in the ledger `name`, in its order; none if there is no such file.

    Raises:
      StorageError: when it cannot be read.
    """
    with readable(path := folder / "evals" / f"{name}.jsonl"):
        records = read_records(path)
    numbered = [{**record, "line": number} for number, record in enumerate(records)]
    active = {record["line"] for record in active_records(numbered)}
    return [_evaluation(item, item["line"] in active) for item in numbered if item.get("kind") != REWIND]


def metric_names(evaluations: Iterable[Evaluation]) -> list[str]:
    """Returns the names of all metrics, in the order in which they come."""
    return list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))


def check_metric(metric: str, evaluations: Iterable[Evaluation]) -> None:
    """Raises UsageError, with near names or those that there are, when no evaluation has the metric."""
    names = metric_names(evaluations)
    if metric not in names:
        raise UsageError(f"--metric: no evaluation has {metric!r}; {suggestion(metric, names)}")


def ranked(evaluations: Iterable[Evaluation], choice: Choice) -> dict[str, list[Evaluation]]:
    """Returns dataset -> the evaluations that count, the best first, of each step one; the first of equals first.

    What is not finite is no candidate. Values on different data are not compared.
    """
    values = [(one, one.metrics.get(choice.metric, math.nan)) for one in evaluations if one.active]
    candidates = [(one, value) for one, value in values if math.isfinite(value)]
    found: dict[str, dict[int, Evaluation]] = {one.dataset: {} for one, _ in candidates}
    for one, _ in sorted(candidates, key=lambda pair: -pair[1] if choice.comparison == "higher" else pair[1]):
        found[one.dataset].setdefault(one.step, one)
    return {dataset: list(of.values()) for dataset, of in found.items()}


def best_folder(folder: Path, settings: Settings, name: str) -> Path | None:
    """Returns where the best weights by the ledger `name` are kept, a sidecar's apart; None if they are not kept."""
    own = folder if name == VALIDATION else folder / "evals" / name
    return own / settings.best_folder if settings.best_folder and name != EVAL else None


def named_folder(folder: Path, name: str, best: str) -> Path:
    """Returns where the weights of the best called `best` are kept by the ledger `name`."""
    return (folder if name == VALIDATION else folder / "evals" / name) / BEST_CHECKPOINTS / best


def kept(evaluations: Iterable[Evaluation], criterion: Criterion) -> dict[str, list[Evaluation]]:
    """Returns dataset -> the evaluations that count and that a run keeps by `criterion`, the best first."""
    found: dict[str, list[Scored]] = {}
    for one in evaluations:
        scored = criterion.score(one.step, one.metrics, one) if one.active else None
        if scored is not None:
            found.setdefault(one.dataset, []).append(scored)
    return {of: [one.record for one in criterion.ranked(criterion.fold(scored))] for of, scored in found.items()}


def weights_of(evaluation: Evaluation, folder: Path, kept: Sequence[Path]) -> Path | None:
    """Returns where the weights of an evaluation are: the path of a checkpoint without its suffixes; None if nowhere.

    Args:
      evaluation: of a ledger.
      folder: the run's.
      kept: folders of best weights, which are looked at first.
    """
    name = f"ckpt-{evaluation.step}"
    noted = [folder / evaluation.checkpoint] if evaluation.checkpoint else []
    return next((place for place in (*(one / name for one in kept), *noted, folder / name) if _is_there(place)), None)


def info_verdict(best: Iterable[Evaluation], choice: Choice, kept: Path) -> tuple[bool | None, str]:
    """Returns whether info.json in `kept` names one of `best`, and that in words; None where they are not comparable.

    Args:
      best: the best evaluation of each dataset.
      choice: what they are the best by.
      kept: folder of the best weights.
    """
    info = read_info(os.fspath(kept), quiet=True)
    if info is None:
        return (False, f"{INFO} is damaged") if (kept / INFO).exists() else (None, f"there is no {INFO}")
    said = f"step {info['step']}, {info['metric']} {info['value']!r}"
    if info["metric"] != choice.metric:
        return None, f"{INFO} goes by another metric: {said}"
    if (info["step"], info["value"]) in [(one.step, one.metrics[choice.metric]) for one in best]:
        return True, f"{INFO} agrees: {said}"
    return False, f"{INFO} differs: {said}"


def _evaluation(record: Mapping[str, Any], active: bool) -> Evaluation:
    seconds = record.get("seconds")
    return Evaluation(
        step=record["step"],
        dataset=str(record.get("dataset") or ""),
        metrics=flat_scalars(record["metrics"], "|"),
        seconds=as_scalar(seconds),
        checkpoint=str(record.get("checkpoint") or ""),
        lineage=record["lineage"],
        active=active,
    )


def _is_there(prefix: Path) -> bool:
    """Whether the index and all parts of a checkpoint are there; not, whether they are whole."""
    names = [path.name for path in prefix.parent.glob(f"{prefix.name}.*") if owner(path.name) == prefix.name]
    parts = [match for name in names if (match := re.fullmatch(r".*-\d+\.data-\d{5}-of-(\d{5})", name))]
    return f"{prefix.name}.index" in names and len(parts) == max((int(part[1]) for part in parts), default=-1)
