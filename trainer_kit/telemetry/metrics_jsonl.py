"""metrics.jsonl: one line per report in the order of the steps, with and without restarts.

A line is strict JSON: a metric that is NaN or infinite is written as the text "nan", "inf" or
"-inf" and read back as a float. A (kind, step) is written once, because an evaluation that is
repeated after a restart gives the same numbers. A step may have several changed hyper-parameters,
one line for each. Such a line is written again only with another value.

A run that goes back to step N moves the lines of later steps to metrics.superseded.jsonl, after a
line {"kind": "resume", "step": N, "superseded": the number of lines}. It copies them first and then
replaces metrics.jsonl, so that a kill in between may leave duplicates there, but loses nothing.
Files of earlier versions, with {"kind": "resume", "step": N} between the reports, are read with
that meaning and converted by the next resume.

Every line is passed to the operating system at once, so that the death of the process loses no more
than the queue of a BackgroundWriter. Lines are not forced to the disk one by one: that would cost
milliseconds each, and a power failure loses the steps since the last checkpoint anyway. `flush`
forces them. A run calls it before a checkpoint is written, so the history is at least as new as the
checkpoint, from which a run can resume even before its record exists.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trainer_kit import files
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.report import CHANGE, DEVICE_USAGE_FIELDS, Report
from trainer_kit.telemetry.scalars import flatten_scalars, from_json_number, to_json_number

if TYPE_CHECKING:
    from pydantic import JsonValue

RESUME = "resume"
# Fields that differ between equal runs.
WALL_CLOCK_FIELDS = (
    "steps_per_second",
    "examples_per_second",
    "seconds",
)
# A resume as earlier versions wrote it between the reports.
_MARKER = b'"kind": "resume"'


class JsonLinesWriter:
    """Appends reports to a file of JSON lines. The first report creates the file and its folder.

    Args:
      path: The local file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._stream: IO[bytes] | None = None
        self._last_step: int | None = None

    def write(self, report: Report) -> None:
        """Appends the report as one line.

        The line has the fields "kind", "step", "steps_per_second", "examples_per_second", "seconds"
        and "metrics". If the run has epochs, "epoch" and "step_in_epoch" follow the step. "metrics"
        contains the report's scalars, with groups and names joined by "/". The DEVICE_USAGE_FIELDS
        that are known follow, and "reason" if the report has one.

        A report whose (kind, step) is already in the file is left out. The report of a changed
        hyper-parameter is left out only if its value is the same. A training report for an earlier
        step than the last line is treated as a resume. An evaluation of an earlier step is inserted
        in its place, by rewriting the file.

        Raises:
          StorageError: when the file cannot be written.
        """
        kind = report.kind
        step = int(report.step)
        record: dict[str, Any] = {"kind": kind, "step": step}
        if report.epoch_progress is not None:
            record["epoch"] = report.epoch_progress.epoch
            record["step_in_epoch"] = report.epoch_progress.step
        for name in WALL_CLOCK_FIELDS:
            value = getattr(report, name)
            record[name] = None if value is None else to_json_number(value)
        scalars = flatten_scalars(report.metrics)
        metrics = {name: to_json_number(value) for name, value in scalars.items()}
        record["metrics"] = metrics
        for name in DEVICE_USAGE_FIELDS:
            value = getattr(report, name)
            if value is not None:
                record[name] = to_json_number(value)
        if report.reason:
            record["reason"] = report.reason

        # The run has gone back, and nobody has called resume.
        if kind == "train" and step < self._read_last_step():
            self.resume(step - 1)
        last_step = self._read_last_step()
        if step > last_step:
            self._append(record)
            return

        # Only a change is compared by its value: an evaluation gives the same numbers again.
        compared_metrics = metrics if kind == CHANGE else None
        if has_report(self.path, kind, step, compared_metrics):
            return
        if step == last_step:
            self._append(record)
        else:
            self._insert_record(record)

    def resume(self, step: int) -> None:
        """Moves the lines of steps after `step` to metrics.superseded.jsonl.

        A last line that was cut is moved too. Lines of `step` itself stay. If no line has to be
        moved, nothing is written, and only the end of the file is read.

        Call it at every start and rollback, with 0 for a run without a checkpoint, while no report
        is waiting (flush a BackgroundWriter first).

        Raises:
          StorageError: when a file cannot be written. metrics.jsonl is then unchanged.
        """
        self.close()
        content, superseded_lines = _split(self.path, int(step))
        if superseded_lines:
            _supersede(superseded_path(self.path), int(step), superseded_lines)
            text = content.decode(errors="replace")
            files.write_text(self.path, text, point="history")

    def flush(self) -> None:
        """Forces the written lines to the disk.

        Raises:
          StorageError: when that fails.
        """
        if self._stream is None:
            return
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except Exception as error:
            raise _storage_error(self.path, error) from error

    def close(self) -> None:
        """Flushes and closes the file. A later report opens it again.

        A second call does nothing.
        """
        try:
            self.flush()
        finally:
            stream = self._stream
            self._stream = None
            self._last_step = None
            # flush has already raised any error that closing could raise.
            with contextlib.suppress(Exception):
                if stream is not None:
                    stream.close()

    def _read_last_step(self) -> int:
        """Returns the step of the last line. -1 if the file has none."""
        if self._last_step is None:
            with _map_file(self.path) as data:
                steps = (record["step"] for _, _, record in _iter_records_reversed(data))
                self._last_step = next(steps, -1)
        return self._last_step

    def _append(self, record: dict[str, Any]) -> None:
        try:
            if self._stream is None:
                self._stream = _open_to_append(self.path)
            self._stream.write(_encode_line(record))
            self._stream.flush()
        except Exception as error:
            raise _storage_error(self.path, error) from error
        self._last_step = record["step"]

    def _insert_record(self, record: dict[str, Any]) -> None:
        self.close()
        with _map_file(self.path) as data:
            # The record follows the last one of its step or of an earlier one.
            place = 0
            for _, end, other in _iter_records_reversed(data):
                if other["step"] <= record["step"]:
                    place = end
                    break
            line = _encode_line(record)
            content = data[:place] + line + data[place:]
        text = content.decode(errors="replace")
        files.write_text(self.path, text, point="history")


def read_active_history(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the reports that count: each (kind, step) once, in the order of steps.

    A record has the content of its line. Every metric is a float. Changes of several
    hyper-parameters at one step all count, the last of each.

    A resume at step N in a file of an earlier version supersedes reports of later steps. So does a
    training report for a step before the last one, whose resume was not recorded. An evaluation of
    an earlier step is inserted in its place. Of two reports of one kind and step, which only
    earlier versions wrote, the later counts. Lines that a crash cut, and lines without a report,
    are left out. Without a file the history is empty.

    Args:
      path: The file.
    """
    records = files.read_json_lines(path)
    return _select_active(record for record in records if _is_report(record))


def read_last_report(path: str | os.PathLike[str], kind: str) -> dict[str, Any] | None:
    """Returns the last report of this kind, None if there is none.

    Every metric is a float. Reads the file from its end.

    Raises:
      StorageError: when the file cannot be read.
    """
    with _map_file(path) as data:
        for _, _, record in _iter_records_reversed(data):
            if record["kind"] == kind:
                return _decode(record)
    return None


def read_reports_from(path: str | os.PathLike[str], step: int) -> list[dict[str, Any]]:
    """Returns the lines of `step` and of later steps in their order, with metrics as floats.

    Reads the file from its end back to the step.

    Raises:
      StorageError: when the file cannot be read.
    """
    records: list[dict[str, Any]] = []
    with _map_file(path) as data:
        for _, _, record in _iter_records_reversed(data):
            if record["step"] < step:
                break
            records.append(_decode(record))
    records.reverse()
    return records


def has_report(
    path: str | os.PathLike[str],
    kind: str,
    step: int,
    metrics: Mapping[str, float | str] | None = None,
) -> bool:
    """Whether the history has a line of this kind for this step.

    Superseded lines do not count. Reads the file from its end back to the step.

    Args:
      path: The file.
      kind: The kind of the line.
      step: The step of the line.
      metrics: Metrics that the line has to contain, with these values as they are in the file. None
        for any metrics.

    Raises:
      StorageError: when the file cannot be read.
    """
    required_items = (metrics or {}).items()
    with _map_file(path) as data:
        for _, _, record in _iter_records_reversed(data):
            # A resume at an earlier step, in a file of an earlier version, ends the search like a
            # report.
            if record["step"] < step:
                return False
            if record["kind"] != kind or record["step"] != step:
                continue
            line_metrics = record.get("metrics") or {}
            if required_items <= line_metrics.items():
                return True
    return False


def read_extent(path: str | os.PathLike[str], step: int) -> tuple[int, int]:
    """Returns (step of the last line up to `step`, bytes up to its end), or (-1, 0) without one.

    A run never changes these lines later, so fewer bytes mean a loss.

    Raises:
      StorageError: when the file cannot be read.
    """
    with _map_file(path) as data:
        for _, end, record in _iter_records_reversed(data):
            if record["step"] <= step:
                return record["step"], end
    return -1, 0


def superseded_path(path: str | os.PathLike[str]) -> str:
    """Returns the path for superseded lines of the history at `path`: metrics.superseded.jsonl."""
    root, suffix = os.path.splitext(os.fspath(path))
    return f"{root}.superseded{suffix}"


def _select_active(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = []
    for record in records:
        kind = record["kind"]
        step = record["step"]
        if kind in (RESUME, "train"):
            while history and history[-1]["step"] > step:
                history.pop()
        if kind != RESUME:
            _insert(history, _decode(record))
    return history


def _insert(history: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Inserts a record after the records up to its step. Removes an equal earlier report."""
    place = len(history)
    while place > 0 and history[place - 1]["step"] >= record["step"]:
        place -= 1
        if _identity(history[place]) == _identity(record):
            del history[place]

    # The record follows the others of its step.
    end = place
    step = record["step"]
    while end < len(history) and history[end]["step"] == step:
        end += 1
    history.insert(end, record)


def _identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the key of a report. Of two reports with the same key only the later counts."""
    # A step may have changes of several hyper-parameters.
    changed_names: frozenset[str] = frozenset()
    if record["kind"] == CHANGE:
        changed_names = frozenset(record["metrics"])
    return record["kind"], record["step"], changed_names


def _split(path: str, step: int) -> tuple[bytes, list[bytes]]:
    """Splits a history for a resume at `step`.

    Returns:
      The remaining content and the superseded lines. (b"", []) if no line is superseded.
    """
    with _map_file(path) as data:
        # Steps never go back, so reading the end is enough, except in a file of an earlier version.
        start = 0
        if data.find(_MARKER) < 0:
            starts = (
                start for start, _, record in _iter_records_reversed(data) if record["step"] <= step
            )
            start = next(starts, 0)

        # The rest after the last line break is empty, unless the last line has no line break.
        *lines, rest = data[start:].split(b"\n")
        if rest:
            lines.append(rest)
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines):
            record = _parse_line(line)
            if record:
                records.append({**record, "line": number})

        active = _select_active([*records, _resume_record(step)])
        all_numbers = {record["line"] for record in records}
        active_numbers = {record["line"] for record in active}
        superseded = all_numbers - active_numbers

        # A last line without a line break was cut, unless it contains a whole record.
        last_number = len(lines) - 1
        is_whole = bool(records) and records[-1]["line"] == last_number
        if rest and not is_whole:
            superseded.add(last_number)
        if not superseded:
            return b"", []

        remaining = [data[:start]]
        superseded_lines = []
        for number, line in enumerate(lines):
            if number in superseded:
                superseded_lines.append(line)
            else:
                remaining.append(line + b"\n")
        return b"".join(remaining), superseded_lines


def _iter_records_reversed(data: bytes | mmap.mmap) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields (start, end, record) of the lines with a record, from the last to the first."""
    end = len(data)
    while end > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        record = _parse_line(data[start:end])
        if record is not None:
            yield start, end, record
        end = start


def _resume_record(step: int) -> dict[str, Any]:
    return {"kind": RESUME, "step": step}


def _supersede(path: str, step: int, lines: list[bytes]) -> None:
    mark = {**_resume_record(step), "superseded": len(lines)}
    try:
        files.report_write_point("history.supersede", path)
        with _open_to_append(path) as stream:
            content = b"".join(line + b"\n" for line in lines)
            stream.write(_encode_line(mark) + content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise _storage_error(path, error) from error


def _encode_line(record: Mapping[str, JsonValue]) -> bytes:
    text = json.dumps(record, allow_nan=False)
    return text.encode() + b"\n"


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the report or the resume in a line, or None if the line contains neither."""
    try:
        record = files.parse_json(line)
    except ValueError:
        return None
    if isinstance(record, dict) and _is_report(record):
        return record
    return None


def _is_report(record: Mapping[str, JsonValue]) -> bool:
    step = record.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool)
    return isinstance(record.get("kind"), str) and is_step


@contextlib.contextmanager
def _map_file(path: str | os.PathLike[str]) -> Iterator[bytes | mmap.mmap]:
    """Yields the content of a file, of which only the used parts are read. b"" without a file."""
    with contextlib.ExitStack() as stack:
        data: bytes | mmap.mmap = b""
        try:
            if os.path.isfile(path) and os.path.getsize(path) > 0:
                stream = stack.enter_context(open(path, "rb"))
                mapped_file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                data = stack.enter_context(mapped_file)
        except OSError as error:
            name = os.fspath(path)
            reason = error.strerror or error
            raise StorageError(f"{name} cannot be read: {reason}") from error
        yield data


def _open_to_append(path: str) -> IO[bytes]:
    """Opens a file at its end, and ends a last line that a crash cut."""
    target = Path(path)
    os.makedirs(target.parent, exist_ok=True)
    is_cut = False
    if target.exists() and target.stat().st_size > 0:
        with open(target, "rb") as stream:
            stream.seek(-1, os.SEEK_END)
            is_cut = stream.read(1) != b"\n"

    local = open(target, "ab")  # noqa: SIM115 -- kept open from report to report
    if is_cut:
        local.write(b"\n")
    return local


def _decode(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with its rates and metrics as floats."""
    metrics = record.get("metrics")
    rates = {}
    for name in WALL_CLOCK_FIELDS:
        if record.get(name) is not None:
            rates[name] = from_json_number(record[name])
    numbers: dict[str, float] = {}
    if isinstance(metrics, dict):
        numbers = {name: from_json_number(value) for name, value in metrics.items()}
    return {**record, **rates, "metrics": numbers}


def _storage_error(path: str, error: Exception) -> StorageError:
    reason = getattr(error, "strerror", None) or error
    return StorageError(f"{path} cannot be written: {reason}")
