"""Shows the best evaluations in a run's ledger, and where their weights are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_kit.cli.evals import evaluation_to_json
from trainer_kit.cli.view import recorded_evaluations as ledgers
from trainer_kit.cli.view.recorded_evaluations import MetricChoice, RecordedEvaluation
from trainer_kit.cli.view.run_status import read_best_options, require_run
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.config.schema.evaluation import BestCheckpointConfig
from trainer_kit.errors import ExitCode, UsageError, suggest_names
from trainer_kit.evals.best.criterion import Criterion

EXAMPLE = "trainer-kit best runs/digits --top=3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, the ledger, the criterion of the best and the number shown."""
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="The folder of a run.")
    parser.add_argument(
        "--name",
        help=(
            "The ledger to read. Default: validation (the training run's), or the only ledger of"
            " the run."
        ),
    )
    ledgers.add_metric_arguments(parser)
    parser.add_argument(
        "--best",
        metavar="NAME",
        help="Shows the best checkpoints that trainer.best_checkpoints keeps under this name.",
    )
    parser.add_argument(
        "--top",
        type=int,
        metavar="K",
        help="The number of evaluations to show for each dataset. Default: 1; with --best: all.",
    )
    parser.add_argument("--json", action="store_true", help="Prints JSON, with all digits.")


def run(arguments: argparse.Namespace) -> int:
    """Prints the best evaluations.

    Raises:
      UsageError: when the run, ledger or metric does not exist, or the ledger or the metric has to
        be named.
      StorageError: when a file cannot be read.
    """
    if arguments.top is not None and arguments.top < 1:
        raise UsageError(f"--top: must be 1 or more, not {arguments.top}")
    folder = require_run(arguments.model_dir)
    options = read_best_options(folder)

    # Without --name, the training run's ledger comes first.
    names = ledgers.require_ledgers(folder, arguments.name)
    if ledgers.VALIDATION not in names and len(names) > 1:
        choices = ", ".join(f"--name={ledger_name}" for ledger_name in names)
        raise UsageError(
            "--name: is required, because several sidecars recorded evaluations and the training"
            f" run none; give one of: {choices}"
        )
    name = names[0]
    arguments.name = name

    evaluations = ledgers.read_evaluations(folder, name)
    if arguments.best is not None:
        return _show_named(arguments, folder, name, options.best_checkpoints, evaluations)

    names = ledgers.metric_names(evaluations)
    own_choice = MetricChoice(
        options.best_checkpoint_eval_metric, options.best_checkpoint_metric_comp
    )
    choice = ledgers.choose_metric(arguments.metric, arguments.comparison, own_choice, names)
    if choice is None:
        raise UsageError(
            "--metric: is required, because the run keeps no best checkpoint;"
            f" {suggest_names('', names)}"
        )
    ledgers.check_metric(choice.metric, names, "trainer.best_checkpoint_eval_metric")

    # The best evaluations of each dataset, and the folders where their weights may be.
    rankings_by_dataset = ledgers.rank_evaluations(evaluations, choice)
    rankings = list(rankings_by_dataset.values())
    count = arguments.top or 1
    shown: list[RecordedEvaluation] = []
    for ranking in rankings:
        shown += ranking[:count]
    best_folder = options.best_checkpoint_export_subdir
    best_dir = ledgers.find_best_dir(folder, best_folder, name)
    training_best_dir = ledgers.find_best_dir(folder, best_folder, ledgers.VALIDATION)
    best_dirs = [best_dir, training_best_dir]
    _print_evaluations(arguments, folder, choice, shown, best_dirs)
    return ExitCode.DONE


def _show_named(
    arguments: argparse.Namespace,
    folder: Path,
    name: str,
    named_options: Mapping[str, BestCheckpointConfig],
    evaluations: Sequence[RecordedEvaluation],
) -> int:
    """Prints the evaluations that trainer.best_checkpoints keeps under a name."""
    if arguments.metric or arguments.comparison:
        raise UsageError(
            "--best: always uses the metric and the comparison in trainer.best_checkpoints; leave"
            " out --metric and --comparison"
        )
    if arguments.best not in named_options:
        raise UsageError(
            f"--best: the run keeps no best checkpoint {arguments.best!r}; "
            f"{suggest_names(arguments.best, list(named_options))}"
        )
    options = named_options[arguments.best]
    criterion = Criterion(options.metric, options.metric_comp, options.keep, options.min_delta)
    names = ledgers.metric_names(evaluations)
    ledgers.check_metric(
        criterion.metric, names, f"trainer.best_checkpoints.{arguments.best}.metric"
    )

    rankings_by_dataset = ledgers.select_kept_evaluations(evaluations, criterion)
    rankings = list(rankings_by_dataset.values())
    shown: list[RecordedEvaluation] = []
    for ranking in rankings:
        shown += ranking[: arguments.top]
    choice = MetricChoice(criterion.metric, criterion.comparison)
    best_dir = ledgers.get_named_best_dir(folder, name, arguments.best)
    _print_evaluations(arguments, folder, choice, shown, [best_dir])
    return ExitCode.DONE


def _print_evaluations(
    arguments: argparse.Namespace,
    folder: Path,
    choice: MetricChoice,
    evaluations: Sequence[RecordedEvaluation],
    best_dirs: Sequence[Path | None],
) -> None:
    """Prints evaluations with their weights."""
    name = arguments.name
    search_dirs = [path for path in best_dirs if path]
    weights = [_weights(evaluation, folder, search_dirs) for evaluation in evaluations]
    if arguments.json:
        rows = [
            {
                "value": evaluation.metrics[choice.metric],
                **evaluation_to_json(evaluation),
                "weights": path,
            }
            for evaluation, path in zip(evaluations, weights, strict=True)
        ]
        record = {
            "name": name,
            "metric": choice.metric,
            "comparison": choice.comparison,
            "best": rows,
        }
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        table = _table(name, choice, evaluations, weights)
        print_tables([table], sys.stdout)


def _weights(evaluation: RecordedEvaluation, folder: Path, best_dirs: Sequence[Path]) -> str | None:
    path = ledgers.find_weights(evaluation, folder, best_dirs)
    return None if path is None else os.path.relpath(path, folder)


def _table(
    name: str,
    choice: MetricChoice,
    best: Sequence[RecordedEvaluation],
    weights: Sequence[str | None],
) -> Table:
    metric = choice.metric
    rows = [
        [
            str(evaluation.step),
            format_metric(evaluation.metrics[metric]),
            evaluation.dataset,
            evaluation.checkpoint,
            path or "gone",
        ]
        for evaluation, path in zip(best, weights, strict=True)
    ]
    summary = f"no evaluation has a finite {metric}"
    if rows:
        summary = f"best by {metric} ({choice.comparison})"
    headers = ["step", metric, "dataset", "checkpoint", "weights"]
    texts = frozenset(headers[2:])
    return Table(f"{name}: {summary}", headers, rows, left_aligned=texts)
