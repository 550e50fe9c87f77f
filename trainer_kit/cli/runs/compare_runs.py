"""Compares runs: their different config values, and the best and the last value of a metric.

Runs that differ only in their seeds are one group, with the mean and the standard deviation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_kit import files
from trainer_kit.cli.runs.list_runs import format_state, list_remarks, read_runs
from trainer_kit.cli.view.pictures import check_picture, save_picture
from trainer_kit.cli.view.recorded_evaluations import (
    MetricChoice,
    add_metric_arguments,
    choose_metric,
)
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.evals.run_summary import FINISHED, STOPPED_EARLY, RunSummary, find_best
from trainer_kit.telemetry.scalars import LOSS

if TYPE_CHECKING:
    from pandas import DataFrame

# How the paths of seeds end.
_SEEDS = (".seed", ".random_seed", ".sampling_seed")
_CONFIG = "config."
# More columns, or more names in a picture, cannot be told apart.
_MAX_COLUMNS = 8
_MAX_CURVES = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the runs, the metric and the files to write."""
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="RUN|FOLDER",
        help="The folders of runs, or a folder with runs in it, at any depth.",
    )
    add_metric_arguments(parser)
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="Writes the table to this file, with all digits and the last of every metric.",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="Saves the curves of the metric as a picture, such as curves.png.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the table of the runs, best first, and that of the groups of seeds.

    Raises:
      UsageError: when a folder, the metric or matplotlib does not exist.
      StorageError: when a file cannot be written.
    """
    if arguments.plot:
        check_picture("--plot", arguments.plot)
    runs = read_runs(arguments.folders)
    if not runs:
        folders = ", ".join(arguments.folders)
        raise UsageError(f"FOLDER: {folders} holds no run; give a folder with runs in it")
    choice = _choose_metric(runs, arguments.metric, arguments.comparison)
    frame = build_frame(runs, choice)

    paths = [column for column in frame if column.startswith(_CONFIG)]
    labels = _shorten_paths(paths)
    notes = list_remarks(runs)
    runs_table = _build_table(frame, choice.metric, labels, notes)
    tables = [runs_table]
    groups = group_by_seed(frame, choice, paths)
    if groups["runs"].max() > 1:
        groups = groups.rename(columns=labels)
        groups_table = Table(
            "finished runs that differ only in seeds: mean and standard deviation (std)",
            list(groups),
            _format_cells(groups),
        )
        tables.append(groups_table)
    print_tables(tables, sys.stdout)

    if arguments.csv:
        text = frame.to_csv(index=False)
        files.write_text(arguments.csv, text)
        print(f"the table is in {arguments.csv}")
    if arguments.plot:
        _save_curves(runs, frame["run"], choice.metric, arguments.plot)
    return ExitCode.DONE


def _choose_metric(
    runs: Mapping[str, RunSummary], metric: str | None, comparison: str | None
) -> MetricChoice:
    """Returns the metric to compare: by default the one that most runs are measured by."""
    names: list[str] = []
    own_choices: list[MetricChoice] = []
    for summary in runs.values():
        names += summary.evaluations
        names += summary.training
        if summary.metric:
            own_choice = MetricChoice(summary.metric, summary.comparison)
            own_choices.append(own_choice)
    # No folder may contain a run.
    if not own_choices:
        own_choice = MetricChoice(LOSS, "lower")
        own_choices.append(own_choice)
    most_common = statistics.mode(own_choices)
    return choose_metric(metric, comparison, most_common, names) or most_common


def _shorten_paths(paths: Sequence[str]) -> dict[str, str]:
    """Returns the last name of each path, or the path itself where paths share a last name."""
    labels = {}
    counts: Counter[str] = Counter()
    for path in paths:
        _, _, name = path.rpartition(".")
        labels[path] = name
        counts[name] += 1
    for path, name in labels.items():
        if counts[name] > 1:
            labels[path] = path
    return labels


def build_frame(runs: Mapping[str, RunSummary], choice: MetricChoice) -> DataFrame:
    """Returns a row for each run, the best first.

    The columns of config values that differ begin with "config.". A value of a branch that only
    some runs have chosen counts if it differs between those. The columns of the last value of each
    metric begin with "last." for evaluations and with "train." for training.
    """
    import pandas

    rows = []
    evaluated_metrics: set[str] = set()
    for summary in runs.values():
        evaluated_metrics.update(summary.evaluations)
    for name, summary in runs.items():
        curve = summary.evaluations.get(choice.metric, ())
        # Values of training and of evaluations are not comparable.
        if choice.metric not in evaluated_metrics:
            curve = summary.read_training_curve(choice.metric)
        best = find_best(curve, choice.comparison)
        row = {
            "run": name,
            "state": format_state(summary),
            "step": summary.step,
            "total_steps": summary.total_steps,
            "metric": choice.metric,
            "best": best.value if best else None,
            "best_step": best.step if best else None,
            "last": curve[-1].value if curve else None,
            "steps_per_second": summary.steps_per_second,
            "examples_per_second": summary.examples_per_second,
            "last_sign_of_life": summary.updated,
        }
        for path, value in summary.config.items():
            text = json.dumps(value, ensure_ascii=False)
            column = _CONFIG + path
            row[column] = text.strip('"')
        for metric, points in summary.evaluations.items():
            column = f"last.{metric}"
            row[column] = points[-1].value
        for metric, number in summary.training.items():
            column = f"train.{metric}"
            row[column] = number
        rows.append(row)

    # Steps stay whole numbers where some runs have none.
    frame = pandas.DataFrame(rows, dtype=object)
    for column in frame:
        if column.startswith(_CONFIG):
            texts = frame[column]
            if texts.nunique() < 2:
                del frame[column]
    number_types = dict.fromkeys(["best", "last", "steps_per_second"], float)
    frame = frame.astype(number_types)
    is_ascending = choice.comparison == "lower"
    return frame.sort_values("best", ascending=is_ascending, kind="stable")


def group_by_seed(frame: DataFrame, choice: MetricChoice, paths: Iterable[str]) -> DataFrame:
    """Returns the groups of finished runs that differ at most in their seeds, the best first.

    Their columns are "runs" and the mean and standard deviation of the best and the last value.
    """
    keys = ["metric"]
    for path in paths:
        if not path.endswith(_SEEDS):
            keys.append(path)

    states = frame["state"]
    is_finished = states.isin([FINISHED, STOPPED_EARLY])
    finished = frame[is_finished]
    groups = finished.groupby(keys, dropna=False)
    spread = groups.agg(
        **{
            "runs": ("best", "count"),
            "mean best": ("best", "mean"),
            "std best": ("best", "std"),
            "mean last": ("last", "mean"),
            "std last": ("last", "std"),
        }
    )
    is_ascending = choice.comparison == "lower"
    ranked = spread.sort_values("mean best", ascending=is_ascending)
    return ranked.reset_index()


def _build_table(
    frame: DataFrame,
    metric: str,
    labels: Mapping[str, str],
    notes: list[str],
) -> Table:
    labelled_paths = list(labels)
    shown_paths = labelled_paths[:_MAX_COLUMNS]
    columns = {"run": "run"}
    for path in shown_paths:
        columns[path] = labels[path]
    columns["best"] = f"best {metric}"
    columns["best_step"] = "at step"
    columns["last"] = f"last {metric}"
    columns["steps_per_second"] = "steps/s"
    columns["state"] = "state"
    column_names = list(columns)
    shown_frame = frame[column_names]

    hidden = len(labels) - len(shown_paths)
    if hidden:
        notes.append(f"{hidden} more config values differ; --csv=FILE shows them")
    return Table(
        "runs, best first",
        list(columns.values()),
        _format_cells(shown_frame),
        left_aligned=frozenset({"run", "state"}),
        notes=notes,
    )


def _format_cells(frame: DataFrame) -> list[list[str]]:
    import pandas

    rows = []
    for values in frame.itertuples(index=False):
        cells = []
        for value in values:
            text = ""
            if isinstance(value, str):
                text = value
            elif pandas.notna(value):
                text = format_metric(value)
            cells.append(text)
        rows.append(cells)
    return rows


def _save_curves(
    runs: Mapping[str, RunSummary], ranked_names: Iterable[str], metric: str, path: str
) -> None:
    """Saves the curves of the metric: solid lines for evaluations, dashed ones for training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=metric)
    axes.set_title(f"{metric} in evaluations (solid) and in training (dashed)")
    # The names of several validation sets come first.
    _, _, name = metric.rpartition("|")
    training_metric = LOSS if name == "validation_loss" else name
    best_names = list(ranked_names)[:_MAX_CURVES]
    for number, run_name in enumerate(best_names):
        summary = runs[run_name]
        color = f"C{number}"
        evaluations = dict(summary.evaluations.get(metric, ()))
        steps = list(evaluations)
        values = list(evaluations.values())
        axes.plot(steps, values, ".-", color=color, label=run_name)
        training = dict(summary.read_training_curve(training_metric))
        steps = list(training)
        values = list(training.values())
        axes.plot(steps, values, "--", color=color)
    figure.legend(loc="outside right upper", title="best first")
    save_picture(figure, "--plot", path)
