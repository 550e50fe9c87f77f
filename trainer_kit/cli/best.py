"""Shows the best evaluations in a run's ledger, where their weights are, and whether info.json agrees."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_kit.cli.evals import evaluation_json
from trainer_kit.cli.view import recorded_evaluations as ledgers
from trainer_kit.cli.view.recorded_evaluations import Choice, Evaluation
from trainer_kit.cli.view.run_status import Settings, open_run, read_settings
from trainer_kit.cli.view.tables import Table, number, show
from trainer_kit.errors import ExitCode, UsageError, suggestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, the ledger, the criterion of the best, and the number of evaluations."""
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="The folder of a run.")
    parser.add_argument(
        "--name",
        help=(
            "The ledger to read. Default: validation (the training run's), or the only ledger of"
            " the run."
        ),
    )
    ledgers.add_choice(parser)
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
    folder = open_run(arguments.model_dir)
    settings = read_settings(folder)
    name = arguments.name = _ledger(folder, arguments.name)
    evaluations = ledgers.read_evaluations(folder, name)
    if arguments.best is not None:
        return _show_named(arguments, folder, name, settings, evaluations)
    choice = ledgers.choose(arguments.metric, arguments.comparison, settings, evaluations)
    if choice is None:
        names = ledgers.metric_names(evaluations)
        raise UsageError(
            "--metric: is required, because the run keeps no best checkpoint;"
            f" {suggestion('', names)}"
        )
    ledgers.check_metric(choice.metric, evaluations, "trainer.best_checkpoint_eval_metric")
    of_datasets = list(ledgers.ranked(evaluations, choice).values())
    kept = ledgers.best_folder(folder, settings, name)
    shown = [one for of in of_datasets for one in of[: arguments.top or 1]]
    own = ledgers.best_folder(folder, settings, ledgers.VALIDATION)
    _show(arguments, folder, choice, of_datasets, shown, [kept, own])
    return ExitCode.DONE


def _ledger(folder: Path, name: str | None) -> str:
    """Returns the named ledger; without a name, the training run's ledger or the only one."""
    names = ledgers.require_ledgers(folder, name)
    if ledgers.VALIDATION in names or len(names) == 1:
        return names[0]  # the training run's ledger comes first
    listed = ", ".join(f"--name={one}" for one in names)
    raise UsageError(
        "--name: is required, because several sidecars recorded evaluations and the training run"
        f" none; give one of: {listed}"
    )


def _show_named(
    arguments: argparse.Namespace,
    folder: Path,
    name: str,
    settings: Settings,
    evaluations: Sequence[Evaluation],
) -> int:
    """Prints the evaluations that trainer.best_checkpoints keeps under a name."""
    if arguments.metric or arguments.comparison:
        raise UsageError(
            "--best: always uses the metric and the comparison in trainer.best_checkpoints; leave"
            " out --metric and --comparison"
        )
    if arguments.best not in settings.named:
        raise UsageError(
            f"--best: the run keeps no best checkpoint {arguments.best!r}; "
            f"{suggestion(arguments.best, list(settings.named))}"
        )
    criterion = settings.named[arguments.best]
    ledgers.check_metric(
        criterion.metric, evaluations, f"trainer.best_checkpoints.{arguments.best}.metric"
    )
    of_datasets = list(ledgers.kept(evaluations, criterion).values())
    place = ledgers.named_folder(folder, name, arguments.best)
    shown = [one for of in of_datasets for one in of[: arguments.top]]
    _show(
        arguments,
        folder,
        Choice(criterion.metric, criterion.comparison),
        of_datasets,
        shown,
        [place],
    )
    return ExitCode.DONE


def _show(
    arguments: argparse.Namespace,
    folder: Path,
    choice: Choice,
    best: Sequence[Sequence[Evaluation]],
    shown: Sequence[Evaluation],
    places: Sequence[Path | None],
) -> None:
    """Prints evaluations with their weights, and whether info.json in the first of `places` names the best."""
    name, kept = arguments.name, places[0]
    verdict = ledgers.info_verdict([of[0] for of in best], choice, kept) if kept else (None, "")
    weights = [_weights(one, folder, [place for place in places if place]) for one in shown]
    if arguments.json:
        rows = [
            {"value": one.metrics[choice.metric], **evaluation_json(one), "weights": place}
            for one, place in zip(shown, weights, strict=True)
        ]
        record = {
            "name": name,
            "metric": choice.metric,
            "comparison": choice.comparison,
            "best": rows,
            "info": {"agrees": verdict[0], "told": verdict[1]},
        }
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        show([_table(name, choice, shown, weights)], sys.stdout)
        print(*filter(None, [verdict[1]]))


def _weights(evaluation: Evaluation, folder: Path, kept: Sequence[Path]) -> str | None:
    place = ledgers.weights_of(evaluation, folder, kept)
    return None if place is None else os.path.relpath(place, folder)


def _table(
    name: str, choice: Choice, best: Sequence[Evaluation], weights: Sequence[str | None]
) -> Table:
    metric = choice.metric
    rows = [
        [str(one.step), number(one.metrics[metric]), one.dataset, one.checkpoint, place or "gone"]
        for one, place in zip(best, weights, strict=True)
    ]
    found = (
        f"best by {metric} ({choice.comparison})"
        if rows
        else f"no evaluation has a finite {metric}"
    )
    headers = ["step", metric, "dataset", "checkpoint", "weights"]
    return Table(f"{name}: {found}", headers, rows, left=frozenset(headers[2:]))
