"""The log of a run: what its terminal shows, in log.txt."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator

from trainer_kit.errors import find_trainer_kit_error
from trainer_kit.process.error_report import format_reason
from trainer_kit.telemetry.report import CHANGE, Report
from trainer_kit.telemetry.report_lines import format_report_lines, replace_unprintable

# The largest number of lines that wait until the file can be written.
_MAX_WAITING_LINES = 1000


class RunLog(logging.Handler):
    """Appends log records and reports to a file, each with its time.

    It is a handler of the root logger, so it gets the records that the terminal shows, and a Writer
    of reports. Lines wait until the run has a record: a run that never takes a step leaves no file.
    They also wait while the file cannot be written, and are lost if there are more than a thousand.
    No error stops the run. Its methods may be called in any thread.

    Attributes:
      path: The file. "" before `start`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.formatter = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
        self._waiting_lines: deque[str] = deque(maxlen=_MAX_WAITING_LINES)
        self.path = ""
        self._record_path = ""

    def start(self, path: str, record_path: str) -> None:
        """Sets the file of the log.

        A line with the time and the command comes before all others. Manifest and heartbeat name
        the host.

        Args:
          path: The path of the log, a local one.
          record_path: A file that exists as soon as there is a run to log.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        command = shlex.join(sys.argv)
        header = f"--- {now}: {command}\n"
        self._waiting_lines.appendleft(header)
        self.path = path
        self._record_path = record_path

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a log record."""
        # Python prints warnings itself unless there is a handler. This handler shows nothing.
        logger = logging.getLogger(record.name)
        while logger.parent is not None and not logger.handlers:
            logger = logger.parent
        default = logging.lastResort
        if logger.handlers == [self] and default is not None and record.levelno >= default.level:
            default.handle(record)

        # A full disk stops no run, and the handler of the terminal reports a wrong message.
        with contextlib.suppress(Exception):
            text = self.format(record)
            text = replace_unprintable(text, keep="\n")
            self._waiting_lines.append(f"{text}\n")
            if os.path.exists(self._record_path):
                folder = os.path.dirname(self.path)
                os.makedirs(folder, exist_ok=True)
                # The file is opened for each line: the folder may be moved or removed.
                with open(self.path, "a", encoding="utf-8", errors="replace") as stream:
                    stream.writelines(self._waiting_lines)
                self._waiting_lines.clear()

    def write(self, report: Report) -> None:
        """Appends the lines of a report. A change has a log record already."""
        if report.kind == CHANGE:
            return
        lines = format_report_lines(report)
        for line in lines:
            self._append(line)

    def write_error(self, error: Exception) -> None:
        """Appends the message of the error that ends the run."""
        mistake = find_trainer_kit_error(error)
        text = str(mistake)
        if mistake is None:
            reason = format_reason(error)
            text = "\n  ".join(reason)
        self._append(f"error: {text}")

    def _append(self, text: str) -> None:
        record = logging.makeLogRecord({"msg": text, "levelno": logging.INFO})
        self.handle(record)


@contextlib.contextmanager
def collect_log() -> Iterator[RunLog]:
    """Yields the log of a run. It collects lines already, and the caller starts it.

    An enclosing context whose log is not started yet gives this log, so that the lines before the
    run belong to it. Runs on the host.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, RunLog) and not handler.path:
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
