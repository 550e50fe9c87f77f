"""The log of a run: what its terminal shows, in log.txt."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator

from trainer_kit.errors import find_trainer_kit_error
from trainer_kit.process.error_report import format_reason
from trainer_kit.telemetry.report import CHANGE, Report
from trainer_kit.telemetry.report_lines import format_report_lines, replace_unprintable

# The lines that wait until the file can be written.
_MOST_WAITING_LINES = 1000


class RunLog(logging.Handler):
    """Appends log records and reports to a file, each with its time.

    It is a handler of the root logger, so it gets the records that the terminal shows, and a Writer
    of reports. Lines wait until the run has a record: a run that never takes a step leaves no file.
    They also wait while the file cannot be written, and are lost if there are more than a thousand.
    No error stops the run. Its methods may be called in any thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting_lines: deque[str] = deque(maxlen=_MOST_WAITING_LINES)
        self._path = ""
        self._record_path = ""

    @property
    def is_started(self) -> bool:
        """Whether the log has a file."""
        return bool(self._path)

    def start(self, path: str, record_path: str) -> None:
        """Sets the file of the log.

        A line with the time, the host and the command comes before all others.

        Args:
          path: The path of the log, a local one.
          record_path: A file that exists as soon as there is a run to log.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        host = socket.gethostname()
        process = os.getpid()
        command = shlex.join(sys.argv)
        header = f"--- {now} on {host}, process {process}: {command}\n"
        self._waiting_lines.appendleft(header)
        self._path = path
        self._record_path = record_path

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a log record."""
        # Python prints warnings itself unless there is a handler. This handler shows nothing.
        logger: logging.Logger | None = logging.getLogger(record.name)
        handlers: list[logging.Handler] = []
        while logger is not None:
            handlers += logger.handlers
            logger = logger.parent
        default = logging.lastResort
        if handlers == [self] and default is not None and record.levelno >= default.level:
            default.handle(record)

        # The handler of the terminal reports a message that cannot be formatted.
        with contextlib.suppress(Exception):
            self._append(self.format(record))

    def write(self, report: Report) -> None:
        """Appends the lines of a report. A change has a log record already."""
        if report.kind != CHANGE:
            for line in format_report_lines(report):
                self._append(line)

    def write_error(self, error: Exception) -> None:
        """Appends the message of the error that ends the run."""
        mistake = find_trainer_kit_error(error)
        reason = [str(mistake)] if mistake is not None else format_reason(error)
        text = "\n  ".join(reason)
        self._append(f"error: {text}")

    def _append(self, text: str) -> None:
        clock = time.strftime("%H:%M:%S")
        text = replace_unprintable(text, keep="\n")
        self.acquire()
        try:
            self._waiting_lines.append(f"{clock} {text}\n")
            if os.path.exists(self._record_path):
                # The file is opened for each line: the folder may be moved or removed.
                content = "".join(self._waiting_lines)
                folder = os.path.dirname(self._path)
                os.makedirs(folder, exist_ok=True)
                with open(self._path, "ab") as stream:
                    stream.write(content.encode())
                self._waiting_lines.clear()
        except OSError:
            pass
        finally:
            self.release()


@contextlib.contextmanager
def collect_log() -> Iterator[RunLog]:
    """Yields the log of a run. It collects lines already, and the caller starts it.

    An enclosing context whose log is not started yet gives this log, so that the lines before the
    run belong to it. Runs on the host.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, RunLog) and not handler.is_started:
            yield handler
            return

    log = RunLog()
    root.addHandler(log)
    try:
        yield log
    except Exception as error:
        log.write_error(error)
        raise
    finally:
        root.removeHandler(log)
