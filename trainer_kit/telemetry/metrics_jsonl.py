"""metrics.jsonl: one line per report in the order of the steps, the same with kills and restarts as without them.

A line is strict JSON: a metric that is NaN or infinite is written as the text "nan", "inf" or
"-inf" and read back as a float. A (kind, step) is written once: an evaluation that is repeated
after a restart gives the same numbers. A step may have several changed hyper-parameters, one line
for each; one is written again only with another value. A run that goes back to step N moves the
lines of later steps to metrics.superseded.jsonl, after a line {"kind": "resume", "step": N,
"superseded": how many}. It copies them first and then replaces metrics.jsonl, so that a kill in
between may leave duplicates there, but loses nothing. Files of earlier versions, with {"kind":
"resume", "step": N} between the reports, are read with that meaning and converted by the next
resume.

Every line is passed to the operating system at once, so that the death of the process loses no more
than the queue of a BackgroundWriter. Lines are not forced to the disk one by one: that would cost
milliseconds each, and a power failure loses the steps since the last checkpoint anyway. `flush`
forces them; called before a checkpoint is written, it makes the history at least as new as the
checkpoint, from which a run can resume even before its record exists.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trainer_kit import files
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.report import CHANGE, Report
from trainer_kit.telemetry.scalars import flatten_scalars, from_json_number, to_json_number

RESUME = "resume"
WALL_CLOCK_FIELDS = (
    "steps_per_second",
    "examples_per_second",
    "seconds",
)  # fields that differ between equal runs
_MARKER = b'"kind": "resume"'  # as earlier versions wrote it between the reports


class JsonLinesWriter:
    """Appends reports to a file of JSON lines; creates the file and its folder with the first one.

    Args:
      path: The local file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._stream: IO[bytes] | None = None
        self._last_step: int | None = None

    def write(self, report: Report) -> None:
        """Appends {"kind", "step", "steps_per_second", "examples_per_second", "seconds", "metrics"}.

        If the run has epochs, "epoch" and "step_in_epoch" follow the step. `metrics` are the
        report's scalars, with groups and names joined by "/"; "reason" follows if there is one. A
        report whose (kind, step) is already in the file is left out; one of a changed
        hyper-parameter only if its value is the same. A training report for an earlier step than
        the last line is treated as a resume; an evaluation of an earlier step is inserted in its
        place, by rewriting the file.

        Raises:
          StorageError: when the file cannot be written.
        """
        kind, step = report.kind, int(report.step)
        record: dict[str, Any] = {"kind": kind, "step": step}
        if report.epoch_progress is not None:
            record["epoch"], record["step_in_epoch"] = (
                report.epoch_progress.epoch,
                report.epoch_progress.step,
            )
        for name in WALL_CLOCK_FIELDS:
            value = getattr(report, name)
            record[name] = None if value is None else to_json_number(value)
        record["metrics"] = {
            name: to_json_number(value) for name, value in flatten_scalars(report.metrics).items()
        }
        if report.reason:
            record["reason"] = report.reason
        if kind == "train" and step < self._read_last_step():
            self.resume(step - 1)
        if step > self._read_last_step():
            self._append(record)
        elif not has_report(self.path, kind, step, record["metrics"] if kind == CHANGE else None):
            self._append(record) if step == self._read_last_step() else self._insert_record(record)

    def resume(self, step: int) -> None:
        """Moves the lines of steps after `step`, and a last line that was cut, to metrics.superseded.jsonl.

        Call it at every start and rollback, with 0 for a run without a checkpoint, while no report
        is waiting (flush a BackgroundWriter first). Lines of `step` itself stay. If there is
        nothing to move, nothing is written, and only the end of the file is read.

        Raises:
          StorageError: when a file cannot be written; metrics.jsonl is then unchanged.
        """
        self.close()
        kept, moved = _split(self.path, int(step))
        if moved:
            _supersede(superseded_path(self.path), int(step), moved)
            files.write_text(self.path, kept.decode(errors="replace"), point="history")

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
        """Flushes and closes the file; a second call does nothing, a later report opens it again."""
        try:
            self.flush()
        finally:
            stream, self._stream = self._stream, None
            self._last_step = None
            # flush has already raised any error that closing could raise.
            with contextlib.suppress(Exception):
                if stream is not None:
                    stream.close()

    def _read_last_step(self) -> int:
        """Returns the step of the last line; -1 if there is none."""
        if self._last_step is None:
            with _map_file(self.path) as data:
                self._last_step = next(
                    (record["step"] for _, _, record in _iter_records_reversed(data)), -1
                )
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
            place = next(
                (
                    end
                    for _, end, other in _iter_records_reversed(data)
                    if other["step"] <= record["step"]
                ),
                0,
            )
            text = data[:place] + _encode_line(record) + data[place:]
        files.write_text(self.path, text.decode(errors="replace"), point="history")


def read_active_history(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the reports in the file at `path` that count: each (kind, step) once, in the order of steps.

    A record has the content of its line; every metric is a float.

    Changes of several hyper-parameters at one step all count, the last of each.

    A resume at step N in a file of an earlier version supersedes reports of later steps. So does a
    training report for a step before the last one: the resume was not recorded. An evaluation of an
    earlier step is inserted in its place. Of two reports of one kind and step, which only earlier
    versions wrote, the later counts. Lines that a crash cut, and lines without a report, are left
    out. Without a file the history is empty.
    """
    return _select_active(record for record in files.read_json_lines(path) if _is_report(record))


def has_report(
    path: str | os.PathLike[str], kind: str, step: int, metrics: Mapping[str, Any] | None = None
) -> bool:
    """Whether the history at `path` has a line of this kind for this step; superseded lines do not count.

    Reads the file from its end back to the step.

    Args:
      path: The file.
      kind: The kind of the line.
      step: The step of the line.
      metrics: Metrics that the line has, with these values as they are in the file; None: any.

    Raises:
      StorageError: when the file cannot be read.
    """
    with _map_file(path) as data:
        # A resume at an earlier step, in a file of an earlier version, ends the search like a
        # report.
        near = itertools.takewhile(
            lambda record: record["step"] >= step,
            (record for _, _, record in _iter_records_reversed(data)),
        )
        found = [
            record.get("metrics") or {}
            for record in near
            if (record["kind"], record["step"]) == (kind, step)
        ]
    return any((metrics or {}).items() <= one.items() for one in found)


def read_extent(path: str | os.PathLike[str], step: int) -> tuple[int, int]:
    """Returns (step of the last line up to `step`, bytes up to its end); (-1, 0) if there is none.

    A run never changes these lines later, so fewer bytes mean a loss.

    Raises:
      StorageError: when the file cannot be read.
    """
    with _map_file(path) as data:
        return next(
            (
                (record["step"], end)
                for _, end, record in _iter_records_reversed(data)
                if record["step"] <= step
            ),
            (-1, 0),
        )


def superseded_path(path: str | os.PathLike[str]) -> str:
    """Returns the path for superseded lines of the history at `path`: metrics.superseded.jsonl."""
    root, suffix = os.path.splitext(os.fspath(path))
    return f"{root}.superseded{suffix}"


def _select_active(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = []
    for record in records:
        kind, step = record["kind"], record["step"]
        if kind in (RESUME, "train"):
            while history and history[-1]["step"] > step:
                history.pop()
        if kind != RESUME:
            _insert(history, _decode(record))
    return history


def _insert(history: list[dict[str, Any]], record: dict[str, Any]) -> None:
    place = len(history)
    while place > 0 and history[place - 1]["step"] >= record["step"]:
        place -= 1
        if _identity(history[place]) == _identity(record):
            del history[place]
    end = place
    while end < len(history) and history[end]["step"] == record["step"]:
        end += 1
    history.insert(end, record)


def _identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what two reports have in common of which only the later counts."""
    return (
        record["kind"],
        record["step"],
        frozenset(record["metrics"] if record["kind"] == CHANGE else ()),
    )


def _split(path: str, step: int) -> tuple[bytes, list[bytes]]:
    """Returns (remaining content, superseded lines) for a resume at `step`; (b"", []) if no line is superseded."""
    with _map_file(path) as data:
        # Steps never go back, so reading the end is enough, except in a file of an earlier version.
        old = data.find(_MARKER) >= 0
        start = (
            0
            if old
            else next(
                (
                    start
                    for start, _, record in _iter_records_reversed(data)
                    if record["step"] <= step
                ),
                0,
            )
        )
        *lines, cut = data[start:].split(b"\n")
        found = {
            number: record
            for number, line in enumerate([*lines, cut])
            if (record := _parse_line(line))
        }
        active = _select_active(
            [
                *({**record, "line": number} for number, record in found.items()),
                _resume_record(step),
            ]
        )
        going = found.keys() - {record["line"] for record in active}
        if cut and len(lines) not in found:
            going.add(len(lines))
        lines += [cut] if cut else []
        if not going:
            return b"", []
        staying = b"".join(line + b"\n" for number, line in enumerate(lines) if number not in going)
        return data[:start] + staying, [lines[number] for number in sorted(going)]


def _iter_records_reversed(data: bytes | mmap.mmap) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields (start, end, record) of the lines with a record, the last first."""
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
            stream.write(_encode_line(mark) + b"".join(line + b"\n" for line in lines))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise _storage_error(path, error) from error


def _encode_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the report or the resume in a line; None if it holds neither."""
    try:
        record = files.parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and _is_report(record) else None


def _is_report(record: Mapping[str, Any]) -> bool:
    step = record.get("step")
    return (
        isinstance(record.get("kind"), str) and isinstance(step, int) and not isinstance(step, bool)
    )


@contextlib.contextmanager
def _map_file(path: str | os.PathLike[str]) -> Iterator[bytes | mmap.mmap]:
    """Yields the content of a file, of which only the used parts are read; b"" without a file."""
    with contextlib.ExitStack() as stack:
        data: bytes | mmap.mmap = b""
        try:
            if os.path.isfile(path) and os.path.getsize(path) > 0:
                stream = stack.enter_context(open(path, "rb"))
                data = stack.enter_context(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise StorageError(
                f"{os.fspath(path)} cannot be read: {error.strerror or error}"
            ) from error
        yield data


def _open_to_append(path: str) -> IO[bytes]:
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
    metrics = record.get("metrics")
    rates = {
        name: from_json_number(record[name])
        for name in WALL_CLOCK_FIELDS
        if record.get(name) is not None
    }
    numbers = (
        {name: from_json_number(value) for name, value in metrics.items()}
        if isinstance(metrics, dict)
        else {}
    )
    return {**record, **rates, "metrics": numbers}


def _storage_error(path: str, error: Exception) -> StorageError:
    return StorageError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}")
