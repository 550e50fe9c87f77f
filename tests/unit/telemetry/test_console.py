from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.builders import report
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.report import EVALUATING, Activity

HIDE = "\x1b[?25l"
SHOW = "\x1b[?25h"
PROGRAM = """
import sys
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.report import Report

def train(step):
    metrics = {"training_loss": 1 / step, "learning_rate": 0.001}
    rates = {"steps_per_second": 10.0, "examples_per_second": 320.0}
    return Report(kind="train", step=step, total_steps=TOTAL, metrics=metrics, **rates)

def evaluation(step):
    metrics, best = {"accuracy": step / 1000}, ("accuracy", step / 1000, step)
    return Report(kind="validation", step=step, total_steps=TOTAL, metrics=metrics, best=best)

writer = ConsoleWriter(sys.stdout)
try:
    writer.log("hello")
    for step in range(100, 301, 100):
        writer.write(train(step))
        writer.flush()
        writer.write(evaluation(step))
    BODY
finally:
    CLOSE
"""


def build_program(
    body: str = "pass", close: str = "writer.close()", total: int | None = 400
) -> list[str]:
    code = PROGRAM.replace("BODY", body).replace("CLOSE", close).replace("TOTAL", repr(total))
    return [sys.executable, "-c", code]


def run_on_terminal(command: list[str], columns: int = 100, **environment: str) -> tuple[int, str]:
    """Runs `command` on a new terminal; returns its exit status and all that it wrote there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "COLUMNS", "LINES")
    }
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**plain, "TERM": "xterm-256color", **environment},
    )
    os.close(slave)
    written = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(master)
    return process.wait(), written.decode()


def screen(written: str) -> list[str]:
    """Returns what a terminal shows after `written`: lines, cursor up and erasing a line."""
    rows = [""]
    row = 0
    column = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row = row + 1
            column = 0
            rows += [""] * (row + 1 - len(rows))
        elif token.startswith("\x1b"):
            if token[-1] == "A":
                row = max(0, row - int(token[2:-1] or 1))
            elif token[-1] == "K":
                rows[row] = ""
        else:
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)

    return [line.rstrip() for line in rows]


def test_a_pipe_gets_plain_lines_one_per_report() -> None:
    written = subprocess.run(build_program(), capture_output=True, check=True).stdout

    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", written)

    lines = written.decode().splitlines()
    assert len(lines) == 7
    assert lines[0] == "hello"
    assert lines[3] == (
        "train | step 200/400 | 10.0 steps/s | 320.0 examples/s | 0:00:20 left | "
        "training_loss 0.005 | "
        "learning_rate 0.001"
    )
    assert lines[4] == "validation | step 200/400 | accuracy 0.2 | best accuracy 0.2 at step 200"


def test_a_terminal_shows_progress_with_evaluations_above() -> None:
    status, written = run_on_terminal(build_program("print('a word from the task')"))

    assert status == 0

    lines = screen(written)
    assert lines[0] == "hello"
    assert [line for line in lines if line.startswith("validation")] == [
        (
            f"validation | step {step}/400 | accuracy 0.{step // 100} | best accuracy "
            f"0.{step // 100} at step {step}"
        )
        for step in (100, 200, 300)
    ]

    bars = [place for place, line in enumerate(lines) if line.startswith("train")]
    assert len(bars) == 1
    assert re.fullmatch(r"train  step 300/400  ━+.*  0:00:10 left", lines[bars[0]])

    figures = " ".join(lines[bars[0] + 1 :])
    for figure in (
        "10.0 steps/s",
        "320.0 examples/s",
        "training_loss 0.003333",
        "learning_rate 0.001",
    ):
        assert figure in figures

    assert "best accuracy 0.3 at step 300" in figures
    assert lines.index("a word from the task") < bars[0]
    assert written.count("step 200/400") > 1


def test_without_a_known_end_there_is_no_bar_and_no_time_left() -> None:
    status, written = run_on_terminal(build_program(total=None))

    assert status == 0
    assert "train  step 300" in screen(written)
    assert "left" not in written


@pytest.mark.parametrize(
    ("body", "close", "expected"),
    [
        ("pass", "pass", 0),
        ("raise ValueError('boom')", "writer.close()", 1),
        ("raise ValueError('boom')", "pass", 1),
    ],
    ids=["never closed", "closed after an error", "an error, never closed"],
)
def test_the_terminal_gets_its_cursor_back(body: str, close: str, expected: int) -> None:
    status, written = run_on_terminal(build_program(body, close))

    assert status == expected
    assert HIDE in written
    assert written.rindex(SHOW) > written.rindex(HIDE)
    assert ("ValueError: boom" in screen(written)) == (expected == 1)


def test_a_narrow_terminal_is_not_overrun() -> None:
    _, written = run_on_terminal(build_program(), columns=44)
    lines = screen(written)

    bar = next(place for place, line in enumerate(lines) if line.startswith("train"))

    assert all(len(line) <= 44 for line in lines[bar:])
    assert "step 300/400" in lines[bar]


def test_a_terminal_that_cannot_draw_gets_lines() -> None:
    _, written = run_on_terminal(build_program(), TERM="dumb")

    assert "\x1b" not in written
    assert len(written.splitlines()) == 7


def test_a_run_goes_on_when_the_pipe_is_closed(tmp_path: Path) -> None:
    body = "[writer.write(train(step)) for step in range(1, 5000)]; open(sys.argv[1], 'w').close()"
    command = [*build_program(body), str(tmp_path / "done")]

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()

    assert (tmp_path / "done").exists()
    assert errors.count("the output is closed") == 1


def test_a_run_goes_on_when_the_terminal_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    reports = [report(step, total_steps=9) for step in range(1, 9)]
    master, slave = pty.openpty()
    writer = ConsoleWriter(os.fdopen(slave, "w"), interactive=True)
    writer.write(reports[0])
    os.close(master)
    for later in reports[1:]:
        writer.write(later)
        writer.flush()

    writer.close()

    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "progress is no longer shown: the output is closed"
    ]


def test_a_message_keeps_its_lines_and_loses_control_characters() -> None:
    stream = io.StringIO()

    ConsoleWriter(stream).log("one\ntwo\x1b[31m\r\x07[bold]")

    assert stream.getvalue() == "one\ntwo [31m  [bold]\n"


def test_a_stream_that_cannot_encode_a_name_gets_it_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    ConsoleWriter(stream).write(report(1, größe=1))

    stream.seek(0)

    assert stream.read() == "train | step 1 | gr\\xf6\\xdfe 1\n"


def test_an_activity_is_told_of_when_it_lasts_and_now_and_then() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(stream, activity_after=10.0, activity_every=60.0)

    for seconds in (9.0, 11.0, 40.0, 71.0):
        writer.show_activity(Activity(EVALUATING, 200, 3, 20, seconds))

    assert [line.split(" | ")[3] for line in stream.getvalue().splitlines()] == [
        "0:00:11",
        "0:01:11",
    ]


def test_an_activity_that_is_over_leaves_nothing_on_a_terminal() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(stream, interactive=True)

    writer.show_activity(Activity(EVALUATING, 0, 3, 20, 11.0))
    writer.flush()
    writer.show_activity(None)

    assert "evaluating | step 0 | batch 3/20" in stream.getvalue()
    assert not any(screen(stream.getvalue()))


def test_the_time_left_goes_down_between_reports() -> None:
    now = [0.0]
    stream = io.StringIO()
    writer = ConsoleWriter(stream, interactive=True, clock=lambda: now[0])
    writer.write(report(100, total_steps=200, steps_per_second=10.0))

    writer.flush()

    assert "0:00:10 left" in stream.getvalue()

    now[0] = 4.0

    writer.flush()

    assert "0:00:06 left" in stream.getvalue()

    now[0] = 40.0

    writer.close()

    assert "0:00:00 left" in stream.getvalue()
