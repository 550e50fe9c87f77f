"""Lists the runs in a folder: state, step, best value, speed, and the last sign of life."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer_kit import files
from trainer_kit.cli.view.run_status import list_folders
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.errors import ExitCode, UsageError, suggest_paths
from trainer_kit.evals.run_summary import RunSummary, find_best, find_runs, read_run
from trainer_kit.telemetry.report_lines import format_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for the folder."""
    parser.add_argument(
        "folder", metavar="FOLDER", help="A folder with runs in it, at any depth, or of one run."
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a row for each run.

    Raises:
      UsageError: when the folder is missing or remote.
    """
    folder = require_folder(arguments.folder)
    print_tables([build_runs_table(folder)], sys.stdout)
    return ExitCode.DONE


def require_folder(text: str) -> Path:
    """Returns the path of a local folder.

    Raises:
      UsageError: when there is no such folder, or it is a remote one.
    """
    if files.is_remote(text):
        raise UsageError(
            f"FOLDER: {text!r} is a remote folder; give the path that it is mounted at"
        )
    folder = Path(text).expanduser()
    if not folder.is_dir():
        names = [path.name for path in list_folders(folder.parent)]
        suggestion = suggest_paths(folder, names, "folders")
        raise UsageError(f"FOLDER: there is no folder {folder}; {suggestion}")
    return folder


def read_runs(folder: Path) -> dict[str, RunSummary]:
    """Returns the runs in a folder by name, and the folders in it that contain no run."""
    run_folders = list(find_runs(folder))
    folders = list(run_folders)
    for child in list_folders(folder):
        contains_run = any(path.is_relative_to(child) for path in run_folders)
        if folder not in run_folders and not contains_run:
            folders.append(child)

    runs = {}
    for path in folders:
        name = folder.name if path == folder else str(path.relative_to(folder))
        runs[name] = read_run(path)
    return runs


def build_runs_table(folder: Path) -> Table:
    """Returns a table with a row for each run in a folder."""
    runs = read_runs(folder)
    rate_header, rates = format_rates(runs)
    rows: list[list[str]] = []
    for name, summary in runs.items():
        best = find_best(summary.read_curve(summary.metric), summary.comparison)
        updated = summary.updated
        rows.append(
            [
                name,
                format_state(summary),
                format_step(summary),
                f"{summary.metric} {format_metric(best.value)}" if best else "",
                rates[name],
                updated.astimezone().strftime("%Y-%m-%d %H:%M") if updated else "",
            ]
        )
    if not rows:
        return Table(f"{folder} holds no run yet", (), ())
    headers = ("run", "state", "step", "best", rate_header, "last sign of life")
    return Table(
        f"runs in {folder}",
        headers,
        rows,
        left_aligned=frozenset({"run", "state", "best"}),
        notes=list_remarks(runs),
    )


def format_state(summary: RunSummary) -> str:
    """Returns the state of a run, and whether some of its files are damaged."""
    return f"{summary.state}, damaged" if summary.damage else summary.state


def format_step(summary: RunSummary) -> str:
    """Returns "200/600", or "200" where the last step is not known."""
    step = "" if summary.step is None else str(summary.step)
    return f"{step or 0}/{summary.total_steps}" if summary.total_steps else step


def format_rates(runs: Mapping[str, RunSummary]) -> tuple[str, dict[str, str]]:
    """Returns the unit and the rate of each run: examples per second where all runs know them."""
    summaries = runs.values()
    reported = [summary for summary in summaries if summary.steps_per_second is not None]
    knows_examples = all(summary.examples_per_second is not None for summary in reported)
    rates = {}
    for name, summary in runs.items():
        rate = summary.examples_per_second if knows_examples else summary.steps_per_second
        rates[name] = "" if rate is None else format_number(rate, 4)
    return "examples/s" if knows_examples else "steps/s", rates


def list_remarks(runs: Mapping[str, RunSummary]) -> list[str]:
    """Returns a line for each run with damaged files or something unusual."""
    lines = []
    for name, summary in runs.items():
        remarks = [*summary.damage, *summary.remarks]
        if remarks:
            text = "; ".join(remarks)
            lines.append(f"{name}: {text}")
    return lines
