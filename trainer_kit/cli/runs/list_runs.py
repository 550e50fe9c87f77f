"""Lists the runs in a folder: state, step, best value, speed, and the last sign of life."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_kit.cli.view.run_status import list_folders, require_folder
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.errors import ExitCode
from trainer_kit.evals.run_summary import (
    RunSummary,
    find_best,
    find_runs,
    is_run_folder,
    read_run,
)

EXAMPLE = "trainer-kit runs runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for the folder."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="A folder that contains runs, at any depth, or the folder of one run.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a row for each run.

    Raises:
      UsageError: when the folder is missing or remote.
    """
    table = build_runs_table(arguments.folder)
    print_tables([table], sys.stdout)
    return ExitCode.DONE


def read_runs(folders: Sequence[str]) -> dict[str, RunSummary]:
    """Returns the runs in folders, and the folders in them that contain no run, by name.

    A folder that a link leads to is read once, under its own name where both are in a folder.

    Raises:
      UsageError: when there is no such folder, or it is a remote one.
    """
    names: dict[Path, str] = {}
    for text in folders:
        folder = require_folder("FOLDER", text)
        paths = [folder] if is_run_folder(folder) else []
        if not paths:
            # A link such as runs/latest comes after the run itself.
            for child in sorted(list_folders(folder), key=Path.is_symlink):
                child_runs = list(find_runs(child))
                paths += child_runs or [child]

        for path in paths:
            # With several folders, the name of a run includes its folder.
            is_short = len(folders) == 1 and path != folder
            shown_path = path.relative_to(folder) if is_short else path
            # The name of a folder may not be UTF-8.
            name = bytes(shown_path).decode(errors="backslashreplace")
            names.setdefault(path.resolve(), name)
    return {name: read_run(path) for path, name in names.items()}


def build_runs_table(folder: str) -> Table:
    """Returns a table with a row for each run in a folder.

    Raises:
      UsageError: when there is no such folder, or it is a remote one.
    """
    rows = []
    runs = read_runs([folder])
    for name, summary in runs.items():
        step = format_metric(summary.step)
        if summary.total_steps:
            step += f"/{summary.total_steps}"
        curve = summary.read_curve(summary.metric)
        best = find_best(curve, summary.comparison)
        best_text = ""
        if best is not None:
            value = format_metric(best.value)
            best_text = f"{summary.metric} {value}"
        update_time = ""
        if summary.updated is not None:
            local_time = summary.updated.astimezone()
            update_time = local_time.strftime("%Y-%m-%d %H:%M")
        state = format_state(summary)
        rate = format_metric(summary.steps_per_second)
        row = [name, state, step, best_text, rate, update_time]
        rows.append(row)

    if not rows:
        return Table(f"{folder} contains no run yet", (), ())
    return Table(
        f"runs in {folder}",
        ("run", "state", "step", "best", "steps/s", "last sign of life"),
        rows,
        left_aligned=frozenset({"run", "state", "best"}),
        notes=list_remarks(runs),
    )


def format_state(summary: RunSummary) -> str:
    """Returns the state of a run, and whether some of its files are damaged."""
    if summary.damage:
        return f"{summary.state}, damaged"
    return summary.state


def list_remarks(runs: Mapping[str, RunSummary]) -> list[str]:
    """Returns a line for each run with damaged files or something unusual."""
    lines = []
    for name, summary in runs.items():
        remarks = [*summary.damage, *summary.remarks]
        text = "; ".join(remarks)
        if text:
            lines.append(f"{name}: {text}")
    return lines
