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

# The names of config values that are seeds.
_SEEDS = ("seed", "random_seed", "sampling_seed")
_CONFIG = "config."
# More columns, or more names in a picture, cannot be told apart.
_MAX_COLUMNS = 8
_MAX_CURVES = 10
_FIRST_ROW = frozenset([0])


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
    ranked_runs = {name: runs[name] for name in frame["run"]}

    paths = [column for column in frame if column.startswith(_CONFIG)]
    labels = _shorten_paths(paths)
    runs_table = _build_table(frame, ranked_runs, choice.metric, labels)
    tables = [runs_table]
    groups = group_by_seed(frame, choice, paths)
    if groups["runs"].max() > 1:
        groups = groups.rename(columns=labels)
        groups_table = Table(
            "finished runs that differ only in seeds: mean and standard deviation (std)",
            list(groups),
            _format_cells(groups),
            bold_rows=_FIRST_ROW,
        )
        tables.append(groups_table)
    print_tables(tables, sys.stdout)

    if arguments.csv:
        text = frame.to_csv(index=False)
        files.write_text(arguments.csv, text)
        print(f"the table is in {arguments.csv}")
    if arguments.plot:
        _save_curves(ranked_runs, choice, arguments.plot)
    return ExitCode.DONE


def _choose_metric(
    runs: Mapping[str, RunSummary], metric: str | None, comparison: str | None
) -> MetricChoice:
    """Returns the metric to compare: by default the one that most runs are measured by."""
    names: dict[str, None] = {}
    own_choices: list[MetricChoice] = []
    for summary in runs.values():
        names |= dict.fromkeys(summary.evaluations)
        names |= dict.fromkeys(summary.training)
        if summary.metric:
            own_choice = MetricChoice(summary.metric, summary.comparison)
            own_choices.append(own_choice)
    # No run has a metric.
    if not own_choices:
        own_choices.append(MetricChoice("metric", "higher"))
    most_common = statistics.mode(own_choices)
    return choose_metric(metric, comparison, most_common, list(names)) or most_common


def _shorten_paths(paths: Sequence[str]) -> dict[str, str]:
    """Returns the last name of each path, or the path itself where paths share a last name."""
    names = {}
    counts: Counter[str] = Counter()
    for path in paths:
        name = _get_last_name(path)
        names[path] = name
        counts[name] += 1
    for path, name in names.items():
        if counts[name] > 1:
            names[path] = path
    return names


def _get_last_name(path: str) -> str:
    _, _, name = path.rpartition(".")
    return name


def build_frame(runs: Mapping[str, RunSummary], choice: MetricChoice) -> DataFrame:
    """Returns a row for each run, the best first.

    The columns of config values that differ begin with "config.". A value of a branch that only
    some runs have chosen counts if it differs between those. The columns of the last value of each
    metric begin with "last." for evaluations and with "train." for training.
    """
    import pandas

    # Values of training and of evaluations are not comparable.
    is_evaluated = any(choice.metric in summary.evaluations for summary in runs.values())
    rows = []
    for name, summary in runs.items():
        curve = summary.evaluations.get(choice.metric, ())
        if not is_evaluated:
            curve = summary.read_training_curve(choice.metric)
        best_value: float | None = None
        best_step: int | None = None
        last_value: float | None = None
        if curve:
            last_point = curve[-1]
            last_value = last_point.value
        best = find_best(curve, choice.comparison)
        if best is not None:
            best_value = best.value
            best_step = best.step
        row = {
            "run": name,
            "state": summary.state,
            "step": summary.step,
            "total_steps": summary.total_steps,
            "metric": choice.metric,
            "best": best_value,
            "best_step": best_step,
            "last": last_value,
            "steps_per_second": summary.steps_per_second,
            "examples_per_second": summary.examples_per_second,
            "last_sign_of_life": summary.updated,
        }
        for path, value in summary.config.items():
            # Text is shown without quotes, unless it is empty.
            text = json.dumps(value)
            if isinstance(value, str) and value:
                text = value
            row[_CONFIG + path] = text
        for metric, points in summary.evaluations.items():
            last_point = points[-1]
            row[f"last.{metric}"] = last_point.value
        for metric, number in summary.training.items():
            row[f"train.{metric}"] = number
        rows.append(row)

    # Steps stay whole numbers where some runs have none.
    frame = pandas.DataFrame(rows, dtype=object)
    for column in frame:
        if column.startswith(_CONFIG):
            texts = frame[column]
            if texts.nunique() < 2:
                del frame[column]
    for column in ("best", "last", "steps_per_second"):
        frame[column] = frame[column].astype(float)
    is_ascending = choice.comparison == "lower"
    return frame.sort_values("best", ascending=is_ascending, kind="stable")


def group_by_seed(frame: DataFrame, choice: MetricChoice, paths: Iterable[str]) -> DataFrame:
    """Returns the groups of finished runs that differ at most in their seeds, the best first.

    Their columns are "runs" and the mean and standard deviation of the best and the last value.
    """
    keys = ["metric"]
    for path in paths:
        if _get_last_name(path) not in _SEEDS:
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
    frame: DataFrame, runs: Mapping[str, RunSummary], metric: str, labels: Mapping[str, str]
) -> Table:
    columns = {"run": "run"}
    labelled_paths = list(labels)
    for path in labelled_paths[:_MAX_COLUMNS]:
        columns[path] = labels[path]
    columns["best"] = f"best {metric}"
    columns["best_step"] = "at step"
    columns["last"] = f"last {metric}"
    columns["steps_per_second"] = "steps/s"
    column_names = list(columns)
    shown_frame = frame[column_names]
    rows = _format_cells(shown_frame)
    for row, summary in zip(rows, runs.values(), strict=True):
        state = format_state(summary)
        row.append(state)

    notes = list_remarks(runs)
    hidden = len(labels) - _MAX_COLUMNS
    if hidden > 0:
        notes.append(f"{hidden} more config values differ; --csv=FILE shows them")
    return Table(
        "runs, best first",
        [*columns.values(), "state"],
        rows,
        left_aligned=frozenset({"run", "state"}),
        bold_rows=_FIRST_ROW,
        notes=notes,
    )


def _format_cells(frame: DataFrame) -> list[list[str]]:
    import pandas

    rows = []
    for values in frame.itertuples(index=False):
        cells = []
        for value in values:
            if isinstance(value, str):
                cells.append(value)
            elif pandas.isna(value):
                cells.append("")
            else:
                text = format_metric(value)
                cells.append(text)
        rows.append(cells)
    return rows


def _save_curves(runs: Mapping[str, RunSummary], choice: MetricChoice, path: str) -> None:
    """Saves the curves of the metric: solid lines for evaluations, dashed ones for training."""
    from matplotlib.figure import Figure

    metric = choice.metric
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=metric)
    axes.set_title(f"{metric} in evaluations (solid) and in training (dashed)")
    _, _, name = metric.rpartition("|")
    training_metric = LOSS if name == "validation_loss" else name
    are_positive = True
    for number, (run_name, summary) in enumerate(runs.items()):
        color = "lightgray"
        label = None
        if number < _MAX_CURVES:
            color = f"C{number}"
            label = run_name
        evaluations = summary.evaluations.get(metric, ())
        training = summary.read_training_curve(training_metric)
        for curve, style in ((evaluations, ".-"), (training, "--")):
            if not curve:
                continue
            steps = [point.step for point in curve]
            values = [point.value for point in curve]
            axes.plot(
                steps,
                values,
                style,
                color=color,
                label=label,
                # The best runs are drawn over the others.
                zorder=-number,
            )
            if min(values) <= 0:
                are_positive = False
            # The legend has each run once.
            label = None

    if choice.comparison == "lower" and are_positive:
        axes.set_yscale("log")
    if axes.lines:
        figure.legend(loc="outside right upper", title="best first")
    save_picture(figure, "--plot", path)
