"""Shows reports to people: a progress display on a terminal, one line per report in a pipe or a file."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO, cast

from rich.columns import Columns
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
_LOOP_AFTER = 1.0  # seconds after which a terminal shows a training loop


class ConsoleWriter:
    """Shows reports on `stream`.

    On a terminal, a display that is redrawn in place shows step, total steps, time left, steps/s,
    examples/s, metrics and the best so far; evaluations and messages are printed above it.
    Elsewhere each report is one line without control characters, flushed at once. When the stream
    is closed (a pipe or a terminal) the run continues silently.

    Args:
      stream: The stream to print to, e.g. `sys.stdout`.
      interactive: Whether to draw a display; None checks whether the stream is a terminal that can
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
        self._interactive = _can_draw(stream) if interactive is None else interactive
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
        self._activity_after, self._activity_every = activity_after, activity_every
        self._activity: Activity | None = None  # as it was shown last
        # Messages come from any thread, reports from the writer thread.
        self._lock = threading.RLock()

    def write(self, report: Report) -> None:
        """Shows one report; a change has a line of the log already."""
        if report.kind == CHANGE:
            return
        self._best = report.best or self._best
        if self._interactive and report.kind == "train":
            with self._lock:
                self._newest = (report, self._clock())
                self._live = self._live or self._start()
        else:
            self.log("\n".join(lines.format_report_lines(report)))

    def log(self, text: str) -> None:
        """Prints `text` on a separate line, above the display if there is one. Line breaks are kept.

        May be called from any thread. Control characters become spaces.
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
        with self._lock:
            before = self._activity
            if activity is None:
                self._activity = None
            elif activity.seconds < self._get_delay(activity):
                return
            elif self._interactive:
                self._activity = activity  # before the first drawing
                self._live = self._live or self._start()
            elif before is None or activity.seconds - before.seconds >= self._activity_every:
                self._activity = activity
                self.log(lines.format_activity(activity))
        if activity is None and before is not None and self._newest is None:
            self.close()  # the display showed nothing else

    def _get_delay(self, activity: Activity) -> float:
        first = self._activity_after
        return min(first, _LOOP_AFTER) if self._interactive and activity.name == TRAINING else first

    def flush(self) -> None:
        """Updates the display."""
        if self._live is not None:
            self._live.refresh()
        self._output.flush()

    def close(self) -> None:
        """Stops updating the display and releases the terminal; a second call does nothing."""
        with self._lock:
            live, self._live = self._live, None
        if live is not None:
            live.transient = self._newest is None  # only an activity was drawn, which is over
            live.stop()
            atexit.unregister(live.stop)

    def _start(self) -> Live:
        # Other output to this terminal, such as print(), has to appear above the display.
        ours = self._stream in (sys.stdout, sys.stderr)
        live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=_DRAWINGS_PER_SECOND,
            redirect_stdout=ours and sys.stdout.isatty(),
            redirect_stderr=ours and sys.stderr.isatty(),
        )
        # A process that ends without close() would leave the terminal without a cursor.
        atexit.register(live.stop)
        live.start(refresh=True)
        return live

    def _draw(self) -> Group:
        parts: list[Group | Text] = []
        if self._newest is not None:
            report, since = self._newest
            parts.append(_render_report(report, self._clock() - since, self._best))
        activity = self._activity
        if activity is not None:
            parts.append(Text(lines.format_activity(activity), no_wrap=True, overflow="ellipsis"))
        return Group(*parts)


class _ClosableStream:
    """A stream that may be closed by others: later output is dropped, with one warning."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_closed = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        text = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
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
        # ValueError is what a closed Python file raises.
        except (OSError, ValueError) as error:
            self._is_closed = True
            _LOG.warning("progress is no longer shown: the output is closed (%s)", error)


def _can_draw(stream: TextIO) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty is not None and isatty()) and os.environ.get("TERM", "dumb") not in (
        "dumb",
        "unknown",
    )


def _render_report(report: Report, elapsed: float, best: tuple[str, float, int] | None) -> Group:
    """Returns the report as a bar above its figures, `elapsed` seconds after it came."""
    cells: list[Text | ProgressBar] = [
        Text(report.kind, style="bold"),
        Text(f"step {lines.format_progress(report)}"),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0), expand=report.total_steps is not None)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    if report.total_steps is not None:
        grid.add_column(ratio=1, min_width=4)
        cells.append(ProgressBar(total=max(report.total_steps, 1), completed=report.step))
    for text in lines.format_time_left(report, elapsed):
        grid.add_column(no_wrap=True)
        cells.append(Text(text))
    grid.add_row(*cells)
    figures = lines.format_rates(report) + lines.format_metrics(report)
    figures += [] if best is None else [lines.format_best(best)]
    return Group(
        grid,
        Columns(
            [Text(lines.replace_unprintable(figure)) for figure in figures], padding=(0, 2, 0, 0)
        ),
    )
