"""Compares the speed of trainer_kit with a hand-written loop, Keras' fit, Model Garden and PyTorch Lightning.

    python -m scripts.bench                    all sections: about an hour and a half on two cores
    python -m scripts.bench --quick            most rows with a goal: up to 9 minutes
    python -m scripts.bench --growth           how cost grows: up to an hour
    python -m scripts.bench --only=conv,dense/ours_fused
    python -m scripts.bench --list             names of sections and rows
    python -m scripts.bench --show=FOLDER      the table and the picture of earlier results in FOLDER

A contender is a program whose speed is measured. Each contender of a section runs in a process of its own, which is
started again in each round; the processes take turns of about half a second. A row of the table has the median over
the rounds, and the ratio to the row that its last column names, taken within each round. The first two rows of a
section are its control: equal code in two processes. After nine rounds a section resolves a difference of 3 % if its
control is within 3 % of 1; otherwise up to six rounds follow. A section that does not resolve 3 % decides a goal only
if the row is farther off than equal code was in any round. The table goes to the standard output, the figures to
OUT/bench.json (--growth: growth.json) and a picture to the .png beside it.

Exit code: 0; 1 when a row could not be measured; 2 for a mistake in the arguments; 130 for Ctrl-C, after a table of
the results so far. Missed goals do not change the exit code. For figures worth keeping, the machine should be
otherwise idle.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from scripts.benchmarks import cold, growth, machine, picture, table
from scripts.benchmarks.race import server
from scripts.benchmarks.results import Results, Section
from scripts.benchmarks.subject import Subject
from scripts.benchmarks.subjects import subjects
from trainer_kit.files import write_json

COLD = ("startup", "memory")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if mistake := _mistake(options):
        parser.error(mistake)
    if options.list:
        print("\n".join(_names(options.growth)))
        return 0
    out, name, stopped = Path(options.show or options.out), "growth" if options.growth else "bench", False
    if options.show:
        results = Results.from_dict(json.loads((out / f"{name}.json").read_text()))
    else:
        results, stopped = _measured(options, out / f"{name}.json")
    if stopped and not results.sections:
        return 130
    print("\n".join(table.lines(results)))
    picture.write(results, out / f"{name}.png")
    print(f"\n{out / name}.json, {out / name}.png", file=sys.stderr)
    return 130 if stopped else 1 if results.failures else 0


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="measure most rows with a goal, in one or two rounds")
    kind.add_argument("--growth", action="store_true", help="measure how cost grows")
    parser.add_argument("--only", help="sections or section/row names to measure, separated by commas")
    parser.add_argument("--rounds", type=int, help="number of rounds for each section, instead of its default")
    parser.add_argument("--out", default="runs/bench", help="folder for the results (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of sections and rows")
    parser.add_argument("--show", default="", metavar="FOLDER", help="print and draw earlier results in FOLDER")
    return parser


def _mistake(options: argparse.Namespace) -> str:
    """Returns the mistake in the arguments; "" if there is none."""
    if options.rounds is not None and options.rounds < 1:
        return f"--rounds: {options.rounds} is less than 1"
    known = _known(options.growth)
    for name in [] if options.only is None else options.only.split(","):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"see --list{' --growth' if options.growth else ''}"
            if name in _known(not options.growth):
                hint = "leave out --growth" if options.growth else "it needs --growth"
            return f"--only: there is no {name!r}; {hint}"
    shown = Path(options.show) / ("growth.json" if options.growth else "bench.json")
    return f"--show: there is no {shown}" if options.show and not shown.is_file() else ""


def _measured(options: argparse.Namespace, path: Path) -> tuple[Results, bool]:
    """Measures section by section; returns the results so far, and whether Ctrl-C ended the measurement."""
    begin = time.perf_counter()
    described = {"quick": options.quick, "only": options.only, "rounds": options.rounds, "seconds": 0.0}
    if options.quick:
        described["left out"] = [subject.name for subject in _chosen(options) if not subject.plan.rounds]
    results = Results(machine=machine.describe(), options=described, sections=[])
    try:
        for section in (_growth if options.growth else _sections)(options):
            results.sections.append(section)
            described["seconds"] = round(time.perf_counter() - begin, 1)
            print(f"{described['seconds']:.0f} s: {section.name}", file=sys.stderr, flush=True)
            write_json(path, results.to_dict())
    except KeyboardInterrupt:
        return results, True
    return results, False


def _sections(options: argparse.Namespace) -> Iterator[Section]:
    chosen = [subject for subject in _chosen(options) if subject.plan.rounds]
    if chosen:
        with server() as running:
            for subject in chosen:
                yield subject.measure(running)
    only = _wanted(options)
    if not only or any(name in only for name in COLD):
        commands = [command for command in cold.COMMANDS if command.quick or not options.quick]
        rounds = options.rounds or (1 if options.quick else 2)
        yield from cold.measure(commands, rounds, warm_up=not chosen, growing=not options.quick)


def _growth(options: argparse.Namespace) -> Iterator[Section]:
    with server() as running:
        yield from growth.measure(running, list(_wanted(options)), options.rounds or 0)


def _chosen(options: argparse.Namespace) -> Iterator[Subject]:
    """Yields the requested sections with the requested rows."""
    only = _wanted(options)
    for subject in subjects():
        if only and subject.name not in only:
            continue
        rows = only.get(subject.name)
        if options.quick:
            subject = subject.quick(rows)
        elif rows:
            subject = subject.only(rows)
        rounds = subject.plan.rounds or int(subject.name in only)
        yield replace(subject, plan=replace(subject.plan, rounds=rounds and (options.rounds or rounds)))


def _wanted(options: argparse.Namespace) -> dict[str, set[str]]:
    """Returns section -> requested rows; an empty set means all rows of the section."""
    wanted: dict[str, set[str]] = {}
    for name in filter(None, (options.only or "").split(",")):
        section, _, row = name.partition("/")
        wanted.setdefault(section, set()).update([row] if row else [])
    return wanted


def _known(growing: bool) -> list[str]:
    names = _names(growing)
    return list(dict.fromkeys([*(name.partition("/")[0] for name in names), *names]))


def _names(growing: bool) -> list[str]:
    """Returns the names that --only takes, without the sections that have named rows."""
    rows = [f"{subject.name}/{one.name}" for subject in subjects() for one in subject.contenders]
    return list(growth.NAMES) if growing else [*rows, *COLD]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as by Ctrl-C: processes and folders are cleared away
    sys.exit(main())
