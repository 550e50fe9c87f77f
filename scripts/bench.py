"""Compares the speed of trainer_kit with a hand-written loop, Keras' fit and Model Garden.

    python -m scripts.bench                    all sections but growth: about an hour on two cores
    python -m scripts.bench --quick            most rows with a goal, in one round: some minutes
    python -m scripts.bench --growth           how cost grows: up to an hour
    python -m scripts.bench --only=conv,dense/ours_fused
    python -m scripts.bench --list             names of sections and rows

A contender is a program whose speed is measured. Each contender of a section runs in a process of
its own, which is started again in each round; the processes take turns of about half a second. A
row of the table has the median over the rounds, and the ratio to the row that its last column
names, taken within each round. The row "again" is the control: the code of the first row in another
process. After nine rounds a section resolves a difference of 3 % if its control is within 3 % of 1;
otherwise up to six rounds follow. A section that does not resolve 3 % decides a goal only if the
row is farther off than equal code was in any round. The table goes to the standard output, the
figures to OUT/bench.json (--growth: growth.json).

Exit code: 0; 1 when a row could not be measured; 2 for a mistake in the arguments; 130 for Ctrl-C,
after a table of the results so far. Missed goals do not change the exit code. For figures worth
keeping, the machine should be otherwise idle.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.contenders import SECTIONS
from scripts.benchmarks.race import PRELOADED, race
from scripts.benchmarks.results import Measurement, Section, goal_lines, table_lines
from tests.fork_server import ForkServer
from trainer_kit.files import write_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds: {options.rounds} is less than 1")
    available = [section for section in SECTIONS if section.is_growth == options.growth]
    if options.list:
        print("\n".join(name for section in available for name in _names(section)))
        return 0

    try:
        sections = select_sections(available, options.only, options.quick, options.rounds)
    except ValueError as error:
        parser.error(str(error))

    machine = _describe_machine()
    path = Path(options.out) / ("growth.json" if options.growth else "bench.json")
    measurements: list[Measurement] = []
    is_interrupted = False
    try:
        with ForkServer(preload=PRELOADED) as server:
            for section in sections:
                measurements.append(race(server, section))
                results = [asdict(measurement) for measurement in measurements]
                write_json(path, {"machine": machine, "results": results})
    except KeyboardInterrupt:
        is_interrupted = True

    print(", ".join(f"{name}: {value}" for name, value in machine.items()))
    for measurement in measurements:
        print("", *table_lines(measurement), sep="\n")
    goals = [line for measurement in measurements for line in goal_lines(measurement)]
    print("", "== goals", *goals, sep="\n")
    print(f"\n{path}", file=sys.stderr)

    if is_interrupted:
        return 130
    return int(any(measurement.failed for measurement in measurements))


def select_sections(
    available: Sequence[Section], only: str | None, is_quick: bool, rounds: int | None
) -> list[Section]:
    """Returns the sections to measure, with their rows and rounds.

    Args:
      available: All sections.
      only: Names of sections and section/row, separated by commas; None for all.
      is_quick: Whether to measure rows with a goal only, in one round.
      rounds: The number of rounds, instead of each section's own.

    Raises:
      ValueError: when a name of `only` does not exist.
    """
    names = [] if only is None else only.split(",")
    all_names = [name for section in available for name in _names(section)]
    for name in names:
        if name not in all_names:
            near = difflib.get_close_matches(name, all_names, 1)
            hint = f"did you mean {near[0]}?" if near else "see --list, or --list --growth"
            raise ValueError(f"--only: there is no {name!r}; {hint}")

    sections = []
    for section in available:
        rows = [name.partition("/")[2] for name in names if name.startswith(f"{section.name}/")]
        if names and not rows and section.name not in names:
            continue
        if section.name in names:
            rows = []
        if is_quick and not rows:
            rows = [contender.name for contender in section.contenders if contender.goals]

        if rows:
            section = section.select(rows)
        if is_quick or rounds:
            section = replace(section, rounds=rounds or 1, most_rounds=0)
        sections.append(section)
    return sections


def _names(section: Section) -> list[str]:
    return [section.name, *(f"{section.name}/{row.name}" for row in section.contenders)]


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="measure rows with a goal, in one round")
    kind.add_argument("--growth", action="store_true", help="measure how cost grows")
    parser.add_argument("--only", help="sections or section/row names, separated by commas")
    parser.add_argument("--rounds", type=int, help="rounds of each section, instead of its default")
    parser.add_argument("--out", default="runs/bench", help="folder of the results (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of sections and rows")
    return parser


def _describe_machine() -> dict[str, Any]:
    """Returns the machine, versions, commit and load."""
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    packages = ("tensorflow", "keras", "tf-models-official")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "commit": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "cores": len(os.sched_getaffinity(0)),
        "load before": round(os.getloadavg()[0], 1),
        "Python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Otherwise the first process would take all memory of a GPU.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # As by Ctrl-C: processes and folders are cleared away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
