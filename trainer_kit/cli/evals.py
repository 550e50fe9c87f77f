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
from trainer_kit.cli.view.run_status import read_settings, require_run
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.errors import ExitCode
from trainer_kit.telemetry.scalars import to_json_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, its ledgers, and the criterion of the best."""
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="The folder of a run.")
    parser.add_argument(
        "--name", help="The ledger to read, evals/<name>.jsonl. Default: all of them."
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
    found = {
        name: ledgers.read_evaluations(folder, name)
        for name in ledgers.require_ledgers(folder, arguments.name)
    }
    everything = [one for evaluations in found.values() for one in evaluations]
    choice = ledgers.choose_metric(
        arguments.metric, arguments.comparison, read_settings(folder), everything
    )
    shown = {
        name: [one for one in of if one.is_active or arguments.all] for name, of in found.items()
    }
    if arguments.json:
        print(
            json.dumps(
                [ledger_to_json(name, of, choice) for name, of in shown.items()],
                indent=2,
                allow_nan=False,
            )
        )
    else:
        print_tables(
            [build_table(name, of, choice, folder) for name, of in shown.items()], sys.stdout
        )
    return ExitCode.DONE


def build_table(
    name: str, evaluations: Sequence[RecordedEvaluation], choice: MetricChoice | None, folder: Path
) -> Table:
    """Returns a ledger as a table with one row per evaluation; the best of each dataset is marked."""
    best, metrics = _get_best_ids(evaluations, choice), ledgers.metric_names(evaluations)
    rows = []
    for one in evaluations:
        mark = "best" if id(one) in best else "" if one.is_active else "superseded"
        values = [format_metric(one.metrics.get(metric)) for metric in metrics]
        rows.append(
            [
                str(one.step),
                one.dataset,
                *values,
                format_metric(one.seconds),
                ledgers.format_checkpoint_cell(one, folder),
                mark,
            ]
        )
    count = f"{len(rows)} evaluation{'' if len(rows) == 1 else 's'}"
    title = f"{name}: {count}" + (
        f", best by {choice.metric} ({choice.comparison})" if choice and best else ""
    )
    headers = ["step", "dataset", *metrics, "seconds", "checkpoint", "mark"]
    return Table(
        title, headers, rows, left_aligned=frozenset({"dataset", "checkpoint", "mark"} - {*metrics})
    )


def ledger_to_json(
    name: str, evaluations: Sequence[RecordedEvaluation], choice: MetricChoice | None
) -> dict[str, Any]:
    """Returns a ledger as JSON values; numbers that are not finite become the text "nan", "inf" or "-inf"."""
    best = _get_best_ids(evaluations, choice)
    return {
        "name": name,
        "metric": choice.metric if choice else None,
        "comparison": choice.comparison if choice else None,
        "evaluations": [
            {**evaluation_to_json(one), "best": id(one) in best} for one in evaluations
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
    """Returns the id() of each dataset's best evaluation: two evaluations may be equal in every field."""
    return (
        set()
        if choice is None
        else {id(of[0]) for of in ledgers.rank_evaluations(evaluations, choice).values()}
    )
