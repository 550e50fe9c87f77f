"""Shows the progress of a run and its sidecars, from the files in its folder, until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from trainer_kit.cli.view import recorded_evaluations as ledgers
from trainer_kit.cli.view.liveness import Pulses, pulse_text
from trainer_kit.cli.view.recorded_evaluations import Choice, Evaluation
from trainer_kit.cli.view.run_status import RunStatus, Settings, holds_run, open_run, read_status
from trainer_kit.cli.view.tables import Table, drawn, number, plain, show, terminal
from trainer_kit.errors import ExitCode, StorageError, UsageError
from trainer_kit.files import follow_links
from trainer_kit.folder_identity import FolderIdentity
from trainer_kit.telemetry.report_lines import duration_text, number_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, the update interval, and when to exit."""
    parser.add_argument(
        "model_dir", metavar="MODEL_DIR", help="The folder of a run, or an empty folder in which a run will begin."
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="Seconds between two updates. Default: 1."
    )
    leave = parser.add_mutually_exclusive_group()
    leave.add_argument("--once", action="store_true", help="Shows the run once and exits.")
    leave.add_argument(
        "--follow", action="store_true", help="Keeps watching after the run is finished and no sidecar is alive."
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows the run until it is finished, or until Ctrl-C.

    Raises:
      UsageError: when the folder does not exist, or holds something other than a run.
      StorageError: when a file cannot be read, or the folder is gone.
    """
    if not 0 < arguments.interval < math.inf:
        raise UsageError(f"--interval: {arguments.interval:g} is not a number of seconds above 0")
    folder = open_run(follow_links(arguments.model_dir), may_be_empty=True)
    look = Look(folder)
    try:
        if arguments.once:
            show(look.tables(), sys.stdout)
        else:
            _watch(look, arguments.interval, arguments.follow)
    except KeyboardInterrupt:
        pass  # Ctrl-C is the usual way to exit
    return ExitCode.DONE


class Look:
    """Reads the state of a run repeatedly.

    Attributes:
      over: whether, at the last reading, the run was finished and neither trainer nor sidecar was alive.
    """

    def __init__(self, folder: Path, pulses: Pulses | None = None) -> None:
        self.over = False
        self._folder = folder
        self._pulses = pulses or Pulses()
        self._held: FolderIdentity | None = None

    def tables(self) -> list[Table]:
        """Returns the tables that show the run's current state.

        Raises:
          StorageError: when a file cannot be read, or the folder is gone.
        """
        self.over = False
        if not self._folder.is_dir():
            raise StorageError(f"{self._folder} is gone: somebody removed it, or the run ended before its first step")
        if not holds_run(self._folder):
            return [Table(f"{self._folder}: empty; waiting for a trainer to begin (heartbeat.json)", (), ())]
        self._hold()
        state = read_status(self._folder)
        processes, alive = self._processes(state)
        self.over = state.finished is not None and not alive
        found = {name: ledgers.read_evaluations(self._folder, name) for name in ledgers.ledger_names(self._folder)}
        return [processes, *_training(state), *_evaluations(state, found)]

    def _hold(self) -> None:
        """Remembers the run's folder at the first call; later raises StorageError if another folder took its place."""
        if self._held is None:
            self._held = FolderIdentity(self._folder).__enter__()
        if self._held.look():
            raise StorageError(f"{self._folder} is gone: somebody moved or removed it, and another folder is there now")

    def _processes(self, state: RunStatus) -> tuple[Table, bool]:
        """Returns the table of the trainer and its sidecars, and whether any of them is alive."""
        sidecars = [(name, f"evals/{name}", process) for name, process in state.sidecars.items()]
        rows, styles, alive = [], {}, False
        for row, (name, key, process) in enumerate([("trainer", "", state.trainer), *sidecars]):
            if process is None:
                rows.append([name, "no heartbeat", "", "", ""])
                continue
            pulse = self._pulses.feel(key, process)
            alive = alive or pulse.state == "alive"
            styles[row] = {"alive": "green", "ended": "dim"}.get(pulse.state, "yellow")
            step = "" if process.step is None else str(process.step)
            if step and not key and state.settings.train_steps is not None:
                step += f"/{state.settings.train_steps}"
            place = " pid ".join(str(part) for part in (process.host, process.pid) if part)
            rows.append([name, pulse_text(process, pulse), process.phase, step, place])
        headers = ["process", "state", "phase", "step", "where"]
        how = f"stopped early at step {state.finished}: {state.stopped}" if state.stopped else ""
        done = "" if state.finished is None else f": {how or f'finished at step {state.finished}'}"
        return Table(f"{self._folder}{done}", headers, rows, styles, left=frozenset(headers) - {"step"}), alive


def _training(state: RunStatus) -> list[Table]:
    """Returns a table of the last training report and the newest checkpoint; [] if there is neither."""
    report = state.report
    if report is None and not state.checkpoint:
        return []
    metrics = {} if report is None else {name: number(value) for name, value in report.metrics.items()}
    rate = None if report is None else report.steps_per_second
    steps = state.settings.train_steps
    left = ""
    if report is not None and rate and steps is not None and steps > report.step and state.finished is None:
        left = duration_text((steps - report.step) / rate)
    speed = "" if rate is None else number_text(rate)
    row = ["" if report is None else str(report.step), speed, left, *metrics.values(), state.checkpoint]
    headers = ["step", "steps/s", "left", *metrics, "checkpoint"]
    return [Table("last report of training", headers, [row], left=frozenset({"checkpoint"}))]


def _evaluations(state: RunStatus, found: Mapping[str, list[Evaluation]]) -> list[Table]:
    """Returns a table of the last and the best evaluation of each dataset in each ledger."""
    rows = []
    for name, evaluations in found.items():
        datasets: dict[str, list[Evaluation]] = {}
        for one in evaluations:
            if one.active:
                datasets.setdefault(one.dataset, []).append(one)
        for dataset, of in datasets.items():
            title = f"{name} {dataset}" if len(datasets) > 1 else name
            rows.append(_evaluation_row(title, of, state.settings))
    headers = ["evaluation", "step", "metric", "value", "best step", "best"]
    return [Table("last and best evaluations", headers, rows, left=frozenset({"evaluation", "metric"}))] if rows else []


def _evaluation_row(name: str, evaluations: Sequence[Evaluation], settings: Settings) -> list[str]:
    last, metric = evaluations[-1], settings.metric
    if all(name.startswith(f"{last.dataset}|") for name in last.metrics):  # one of several sets: the same metric of it
        metric = _of_set(metric, last)
    if metric not in last.metrics:
        other = next(iter(last.metrics), "")
        return [name, str(last.step), other, number(last.metrics.get(other)), "", ""]
    ranked = ledgers.ranked(evaluations, Choice(metric, settings.comparison)).get(last.dataset, [])
    best = [str(ranked[0].step), number(ranked[0].metrics[metric])] if ranked else ["", ""]
    return [name, str(last.step), metric, number(last.metrics[metric]), *best]


def _of_set(metric: str, one: Evaluation) -> str:
    """Returns the run's metric named for the validation set of `one`; with a single set it has no set name."""
    whole = f"{one.dataset}|{metric}"
    return whole if whole in one.metrics else f"{one.dataset}|{metric.partition('|')[2]}"


def _watch(look: Look, interval: float, follow: bool) -> None:
    """Redraws in place on a terminal; elsewhere prints the tables when they change."""
    with _display() as display:
        while True:
            display(look.tables())
            if look.over and not follow:
                return
            time.sleep(interval)


@contextlib.contextmanager
def _display() -> Iterator[Callable[[Sequence[Table]], None]]:
    console = terminal(sys.stdout)
    if console is None:
        yield _News().show
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        yield lambda tables: live.update(drawn(tables, console.width), refresh=True)


class _News:
    """Prints tables when anything but the seconds of a silent process has changed."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, tables: Sequence[Table]) -> None:
        text = re.sub(r"silent for \d+ s", "silent", "\n\n".join(map(plain, tables)))
        if text != self._last:
            print(end="\n" if self._last else "")
            show(tables, sys.stdout)
            sys.stdout.flush()
        self._last = text
