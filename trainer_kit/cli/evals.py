"""Shows the recorded evaluations of a run, a table for each ledger, and marks the best."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_kit.cli.view import recorded_evaluations as ledgers
from trainer_kit.cli.view.recorded_evaluations import MetricChoice, RecordedEvaluation
from trainer_kit.cli.view.run_status import read_best_options, require_run
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.errors import ExitCode
from trainer_kit.telemetry.goodput import read_goodput
from trainer_kit.telemetry.scalars import to_json_number

EXAMPLE = "trainer-kit evals runs/digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, its ledgers, and the criterion of the best."""
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="The folder of a run.")
    parser.add_argument(
        "--name",
        help=(
            "The ledger to read, evals/<name>.jsonl. validation is the training run's; the others"
            " are those of sidecars and of mode eval. Default: all of them."
        ),
    )
    ledgers.add_metric_arguments(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help=(
            "Also shows the evaluations that were superseded when the run went back to an earlier"
            " step."
        ),
    )
    parser.add_argument("--json", action="store_true", help="Prints JSON, with all digits.")


def run(arguments: argparse.Namespace) -> int:
    """Prints a table for each ledger.

    Raises:
      UsageError: when the run, ledger or metric does not exist.
      StorageError: when a file cannot be read.
    """
    folder = require_run(arguments.model_dir)
    evaluations_by_ledger = {
        name: ledgers.read_evaluations(folder, name)
        for name in ledgers.require_ledgers(folder, arguments.name)
    }
    all_evaluations = [
        evaluation for evaluations in evaluations_by_ledger.values() for evaluation in evaluations
    ]
    names = ledgers.metric_names(all_evaluations)
    options = read_best_options(folder)
    own_choice = MetricChoice(
        options.best_checkpoint_eval_metric, options.best_checkpoint_metric_comp
    )
    choice = ledgers.choose_metric(arguments.metric, arguments.comparison, own_choice, names)

    shown: dict[str, list[RecordedEvaluation]] = {}
    for name, evaluations in evaluations_by_ledger.items():
        shown[name] = [
            evaluation for evaluation in evaluations if evaluation.is_active or arguments.all
        ]
    if arguments.json:
        records = [ledger_to_json(name, evaluations, choice) for name, evaluations in shown.items()]
        print(json.dumps(records, indent=2, allow_nan=False))
    else:
        tables = [
            build_table(name, evaluations, choice, folder) for name, evaluations in shown.items()
        ]
        print_tables(tables, sys.stdout)
        goodput = read_goodput(folder)
        if goodput is not None and goodput.attempts > 1:
            print(goodput)
    return ExitCode.DONE


def build_table(
    name: str, evaluations: Sequence[RecordedEvaluation], choice: MetricChoice | None, folder: Path
) -> Table:
    """Returns a ledger as a table with one row per evaluation.

    The best evaluation of each dataset is marked.
    """
    best_ids = _get_best_ids(evaluations, choice)
    metrics = ledgers.metric_names(evaluations)
    rows: list[list[str]] = []
    for evaluation in evaluations:
        mark = "" if evaluation.is_active else "superseded"
        if id(evaluation) in best_ids:
            mark = "best"
        values = [format_metric(evaluation.metrics.get(metric)) for metric in metrics]
        rows.append(
            [
                str(evaluation.step),
                evaluation.dataset,
                *values,
                format_metric(evaluation.seconds),
                ledgers.format_checkpoint_cell(evaluation, folder),
                mark,
            ]
        )

    plural = "" if len(rows) == 1 else "s"
    title = f"{name}: {len(rows)} evaluation{plural}"
    if choice and best_ids:
        title += f", best by {choice.metric} ({choice.comparison})"
    headers = ["step", "dataset", *metrics, "seconds", "checkpoint", "mark"]
    left_aligned = frozenset({"dataset", "checkpoint", "mark"} - {*metrics})
    return Table(title, headers, rows, left_aligned=left_aligned)


def ledger_to_json(
    name: str, evaluations: Sequence[RecordedEvaluation], choice: MetricChoice | None
) -> dict[str, Any]:
    """Returns a ledger as JSON values.

    Numbers that are not finite become the text "nan", "inf" or "-inf".
    """
    best_ids = _get_best_ids(evaluations, choice)
    return {
        "name": name,
        "metric": choice.metric if choice else None,
        "comparison": choice.comparison if choice else None,
        "evaluations": [
            {**evaluation_to_json(evaluation), "best": id(evaluation) in best_ids}
            for evaluation in evaluations
        ],
    }


def evaluation_to_json(evaluation: RecordedEvaluation) -> dict[str, Any]:
    """Returns an evaluation as JSON values."""
    return {
        "step": evaluation.step,
        "dataset": evaluation.dataset or None,
        "metrics": {name: to_json_number(value) for name, value in evaluation.metrics.items()},
        "seconds": None if evaluation.seconds is None else to_json_number(evaluation.seconds),
        "checkpoint": evaluation.checkpoint or None,
        "lineage": evaluation.lineage,
        "active": evaluation.is_active,
    }


def _get_best_ids(
    evaluations: Sequence[RecordedEvaluation], choice: MetricChoice | None
) -> set[int]:
    """Returns the id() of each dataset's best evaluation.

    Two evaluations may be equal in every field.
    """
    if choice is None:
        return set()
    rankings = ledgers.rank_evaluations(evaluations, choice)
    return {id(ranking[0]) for ranking in rankings.values()}
