"""Compares runs: their different config values, and the best and the last value of a metric.

Runs that differ only in their seeds are one group, with the mean and the standard deviation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer_kit import files
from trainer_kit.cli.runs.list_runs import format_state, list_remarks, read_runs
from trainer_kit.cli.view.pictures import require_matplotlib, save_picture
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

EXAMPLE = "trainer-kit compare runs --metric=validation_loss --plot=curves.png"

# How the paths of seeds end.
_SEEDS = (".seed", ".random_seed", ".sampling_seed")
_CONFIG = "config."
# A column that runs share if their configs are equal apart from seeds.
_SEEDLESS_CONFIG = "seedless_config"
# The columns that are text.
_TEXTS = frozenset({"run", "state"})
# More curves in a picture cannot be told apart.
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
        require_matplotlib("--plot")
    runs = read_runs(arguments.folders)
    if not runs:
        folders = ", ".join(arguments.folders)
        raise UsageError(f"FOLDER: {folders} contains no run; give a folder with runs in it")
    choice = _choose_metric(runs, arguments.metric, arguments.comparison)
    frame = build_frame(runs, choice)
    paths = [column for column in frame if column.startswith(_CONFIG)]
    groups = group_by_seed(frame, choice, paths)
    labels = _shorten_paths(paths, {*frame, *groups})

    columns = ["run", *paths, "best", "best_step", "last", "steps_per_second", "state"]
    shown_frame = frame[columns].rename(columns=labels)
    title = f"runs by {choice.metric}, best first"
    runs_table = _build_table(title, shown_frame, list_remarks(runs))
    tables = [runs_table]
    if groups["runs"].max() > 1:
        groups = groups.rename(columns=labels)
        title = "runs that differ only in seeds: mean and standard deviation (std)"
        groups_table = _build_table(title, groups)
        tables.append(groups_table)
    print_tables(tables, sys.stdout)

    if arguments.csv:
        text = frame.drop(columns=_SEEDLESS_CONFIG).to_csv(index=False)
        files.write_text(arguments.csv, text)
        print(f"the table is in {arguments.csv}")
    if arguments.plot:
        _save_curves(runs, frame["run"], choice.metric, arguments.plot)
    return ExitCode.DONE


def _choose_metric(
    runs: Mapping[str, RunSummary], metric: str | None, comparison: str | None
) -> MetricChoice:
    """Returns the metric to compare: by default the one that most runs are measured by."""
    names = [LOSS]
    own_choices = []
    for summary in runs.values():
        names += summary.evaluations
        if summary.metric:
            own_choice = MetricChoice(summary.metric, summary.comparison)
            own_choices.append(own_choice)
    # It is possible that no folder contains a run.
    default_choice = MetricChoice(LOSS, "lower")
    most_common = statistics.mode(own_choices or [default_choice])
    return choose_metric(metric, comparison, most_common, names) or most_common


def _shorten_paths(paths: Sequence[str], columns: Collection[str]) -> dict[str, str]:
    """Returns the last name of each path, or the path itself where that name is not unique."""
    names = [path.rpartition(".")[2] for path in paths]
    labels = {}
    for path, name in zip(paths, names, strict=True):
        is_unique = names.count(name) == 1 and name not in columns
        labels[path] = name if is_unique else path
    return labels


def build_frame(runs: Mapping[str, RunSummary], choice: MetricChoice) -> DataFrame:
    """Returns a row for each run, the best first.

    The column "ended" says whether a run has ended as it should. The columns of config values that
    differ begin with "config.". A value of a branch that only some runs have chosen counts if it
    differs between those. The columns of the last value of each metric begin with "last." for
    evaluations and with "train." for training.
    """
    import pandas

    rows = []
    variants: dict[str, set[str]] = {}
    for name, summary in runs.items():
        curve = summary.read_curve(choice.metric)
        best = find_best(curve, choice.comparison)
        row = {
            "run": name,
            "state": format_state(summary),
            "ended": "yes" if summary.state in (FINISHED, STOPPED_EARLY) else "no",
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
        seedless = {}
        for path, value in summary.config.items():
            text = json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)
            column = _CONFIG + path
            row[column] = value if isinstance(value, str) else text
            variants.setdefault(column, set()).add(text)
            if not path.endswith(_SEEDS):
                seedless[path] = text
        # Without an experiment, as in Keras fit, the config does not have the model.
        has_model = summary.config.get("experiment") and len(seedless) > 1
        row[_SEEDLESS_CONFIG] = json.dumps(seedless, sort_keys=True) if has_model else name
        for metric, points in summary.evaluations.items():
            column = f"last.{metric}"
            row[column] = points[-1].value
        for metric, number in summary.training.items():
            column = f"train.{metric}"
            row[column] = number
        rows.append(row)

    # Steps stay whole numbers where some runs have none.
    frame = pandas.DataFrame(rows, dtype=object)
    for column, texts in variants.items():
        if len(texts) < 2:
            del frame[column]
    frame = frame.astype({"best": float, "last": float})
    is_ascending = choice.comparison == "lower"
    return frame.sort_values("best", ascending=is_ascending, kind="stable")


def group_by_seed(frame: DataFrame, choice: MetricChoice, paths: Iterable[str]) -> DataFrame:
    """Returns the groups of runs that differ at most in their seeds, the best first.

    A run that has ended as it should and another run are never in one group, and neither are runs
    without an experiment. The columns are the values at `paths` except seeds, the number of runs,
    how many of them have a finite value, and the mean and standard deviation of the best and the
    last value.
    """
    columns = {path: (path, "first") for path in paths if not path.endswith(_SEEDS)}
    columns |= {
        "runs": ("best", "size"),
        "finite": ("best", "count"),
        "mean best": ("best", "mean"),
        "std best": ("best", "std"),
        "mean last": ("last", "mean"),
        "std last": ("last", "std"),
    }
    # A folder that contains no run has no step.
    has_step = frame["step"].notna()
    groups = frame[has_step].groupby(["ended", _SEEDLESS_CONFIG])
    spread = groups.agg(**columns)
    is_ascending = choice.comparison == "lower"
    ranked = spread.sort_values("mean best", ascending=is_ascending)
    return ranked.reset_index().drop(columns=_SEEDLESS_CONFIG)


def _build_table(title: str, frame: DataFrame, notes: Sequence[str] = ()) -> Table:
    cells = frame.map(_format_cell)
    rows = cells.to_numpy().tolist()
    return Table(title, list(cells), rows, left_aligned=_TEXTS, notes=notes)


def _format_cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    is_missing = value is None or math.isnan(value)
    return "" if is_missing else format_metric(value)


def _save_curves(
    runs: Mapping[str, RunSummary], ranked_names: Iterable[str], metric: str, path: str
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=metric)
    best_names = list(ranked_names)[:_MAX_CURVES]
    for name in best_names:
        curve = runs[name].read_curve(metric)
        steps = [point.step for point in curve]
        values = [point.value for point in curve]
        axes.plot(steps, values, ".-", label=name)
    figure.legend(loc="outside right upper", title="best first")
    save_picture(figure, "--plot", path)
