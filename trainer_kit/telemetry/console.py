"""Shows reports to people: a display on a terminal, or one line per report in a pipe or file."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer_kit.telemetry import report_lines as lines
from trainer_kit.telemetry.report import CHANGE, TRAINING, Activity, Report

_LOG = logging.getLogger(__name__)
# A drawing takes 1 to 2 ms of the interpreter, which the training loop needs too.
_DRAWINGS_PER_SECOND = 2
# Seconds after which a terminal shows a training loop.
_LOOP_AFTER = 1.0


class ConsoleWriter:
    """Shows reports on `stream`.

    On a terminal, a display that is redrawn in place shows step, total steps, time left, steps/s,
    examples/s, metrics and the best so far. Evaluations and messages are printed above it.
    Elsewhere each report is one line without control characters, flushed at once. When the stream
    (a pipe or a terminal) is closed, the run continues silently.

    Args:
      stream: The stream to print to, e.g. `sys.stdout`.
      interactive: Whether to draw a display. None checks whether the stream is a terminal that can
        show one.
      clock: A monotonic clock in seconds, which updates the time left between two reports.
      activity_after: The seconds after which an activity (building, compiling, a training loop, an
        evaluation) is shown. Shorter activities are never shown.
      activity_every: The seconds between two lines about an activity where no display is drawn.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        activity_after: float = 10.0,
        activity_every: float = 30.0,
    ) -> None:
        self._stream = stream
        if interactive is None:
            # Not every object that takes text has isatty, and some terminals cannot draw.
            isatty = getattr(stream, "isatty", None)
            is_terminal = bool(isatty is not None and isatty())
            interactive = is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._interactive = interactive
        self._output = _ClosableStream(stream)
        self._console = Console(
            file=cast("IO[str]", self._output),
            force_terminal=self._interactive,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._clock = clock
        self._live: Live | None = None
        self._newest: tuple[Report, float] | None = None
        self._best: tuple[str, float, int] | None = None
        self._activity_after = activity_after
        self._activity_every = activity_every
        # The activity as it was shown last.
        self._activity: Activity | None = None
        # Messages come from any thread, reports from the writer thread.
        self._lock = threading.RLock()

    def write(self, report: Report) -> None:
        """Shows one report. A change is not shown, since the log has a line for it already."""
        if report.kind == CHANGE:
            return
        self._best = report.best or self._best
        if self._interactive and report.kind == "train":
            with self._lock:
                self._newest = (report, self._clock())
                self._live = self._live or self._start()
        else:
            report_lines = lines.format_report_lines(report)
            self.log("\n".join(report_lines))

    def log(self, text: str) -> None:
        """Prints `text` on a separate line, above the display if it is drawn.

        Line breaks are kept. May be called from any thread. Control characters become spaces.
        """
        text = lines.replace_unprintable(text, keep="\n")
        with self._lock:
            if self._interactive:
                self._console.print(Text(text), soft_wrap=True)
            else:
                self._output.write(text + "\n")
                self._output.flush()

    def show_activity(self, activity: Activity | None) -> None:
        """Shows a long activity of the run: below the display, or as a line from time to time.

        A terminal shows a training loop after one second. Call this repeatedly from one thread, and
        with None when the activity is over.
        """
        delay = self._activity_after
        if self._interactive and activity is not None and activity.name == TRAINING:
            delay = min(delay, _LOOP_AFTER)

        with self._lock:
            previous = self._activity
            if activity is None:
                self._activity = None
            elif activity.seconds < delay:
                return
            elif self._interactive:
                # The activity is set before the first drawing.
                self._activity = activity
                self._live = self._live or self._start()
            elif previous is None or activity.seconds - previous.seconds >= self._activity_every:
                self._activity = activity
                self.log(lines.format_activity(activity))

        is_over = activity is None and previous is not None
        if is_over and self._newest is None:
            # The display showed nothing else.
            self.close()

    def flush(self) -> None:
        """Updates the display."""
        if self._live is not None:
            self._live.refresh()
        self._output.flush()

    def close(self) -> None:
        """Stops updating the display and releases the terminal. A second call does nothing."""
        with self._lock:
            live = self._live
            self._live = None
        if live is not None:
            # Without a report, only an activity was drawn, which is over.
            live.transient = self._newest is None
            live.stop()
            atexit.unregister(live.stop)

    def _start(self) -> Live:
        # Other output to this terminal, such as print(), has to appear above the display.
        is_standard_stream = self._stream in (sys.stdout, sys.stderr)
        live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=_DRAWINGS_PER_SECOND,
            redirect_stdout=is_standard_stream and sys.stdout.isatty(),
            redirect_stderr=is_standard_stream and sys.stderr.isatty(),
        )
        # A process that ends without close() would leave the terminal without a cursor.
        atexit.register(live.stop)
        live.start(refresh=True)
        return live

    def _draw(self) -> Group:
        parts: list[Group | Text] = []
        if self._newest is not None:
            report, report_time = self._newest
            elapsed = self._clock() - report_time
            parts.append(_render_report(report, elapsed, self._best))
        activity = self._activity
        if activity is not None:
            line = lines.format_activity(activity)
            parts.append(Text(line, no_wrap=True, overflow="ellipsis"))
        return Group(*parts)


class _ClosableStream:
    """A stream that other code may close. Later output is dropped, with one warning."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_closed = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        # Characters that the stream cannot encode are written as escapes.
        encoded = text.encode(self.encoding, "backslashreplace")
        text = encoded.decode(self.encoding)
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._is_closed:
            return
        try:
            action()
        except (OSError, ValueError) as error:
            # ValueError is what a closed Python file raises.
            self._is_closed = True
            _LOG.warning("progress is no longer shown: the output is closed (%s)", error)


def _render_report(report: Report, elapsed: float, best: tuple[str, float, int] | None) -> Group:
    """Returns the report as a bar above its figures.

    Args:
      report: The report.
      elapsed: The seconds since the report came.
      best: The name, value and step of the best metric so far, or None.
    """
    cells: list[Text | ProgressBar] = [
        Text(report.kind, style="bold"),
        Text(f"step {lines.format_progress(report)}"),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0), expand=report.total_steps is not None)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    if report.total_steps is not None:
        grid.add_column(ratio=1, min_width=4)
        total = max(report.total_steps, 1)
        cells.append(ProgressBar(total=total, completed=report.step))
    for text in lines.format_time_left(report, elapsed):
        grid.add_column(no_wrap=True)
        cells.append(Text(text))
    grid.add_row(*cells)

    figures = lines.format_rates(report) + lines.format_metrics(report)
    if best is not None:
        figures.append(lines.format_best(best))
    text = lines.replace_unprintable("  ".join(figures))
    return Group(grid, Text(text))
