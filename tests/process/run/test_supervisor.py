"""Supervised commands, with small programs as children: attempts, their records, signals, and exit
codes.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.builders import wait_until
from trainer_kit import supervise
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.files import append_json_line, read_json_lines
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.run.supervisor import Decision, classify_exit_code

# Ends with the next exit code of its arguments; a negative one is minus the number of a signal.
_ENDS = """
import os, sys
from pathlib import Path

count = Path(sys.argv[1])
number = len(count.read_text()) if count.exists() else 0
count.write_text("." * (number + 1))
print(f"attempt {number}")
print(f"error {number}", file=sys.stderr, flush=True)
code = int(sys.argv[2 + number])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""

# Supervises the command in its arguments, with waits that are long.
_SUPERVISOR = """
import logging, sys
from trainer_kit import supervise

logging.basicConfig(level=logging.INFO, format="%(message)s")
options = {"backoff_seconds": 1e6, "max_backoff_seconds": 1e6}
code = supervise(sys.argv[2:], max_restarts=9, log_dir=sys.argv[1], **options)
print("tensorflow" in sys.modules)
sys.exit(code)
"""


def _program_with_ends(folder: Path, *codes: int) -> list[str]:
    return [sys.executable, "-S", "-c", _ENDS, str(folder / "count"), *map(str, codes)]


def _attempts(folder: Path, key: str) -> list[object]:
    return [record[key] for record in read_json_lines(folder / "attempts.jsonl")]


def test_two_preemptions_and_a_crash_take_four_attempts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = _program_with_ends(tmp_path, 75, 75, 1, 0)
    assert supervise(command, max_restarts=1, log_dir=tmp_path, backoff_seconds=0.001) == 0

    assert _attempts(tmp_path, "attempt") == [1, 2, 3, 4]
    assert _attempts(tmp_path, "exit_code") == [75, 75, 1, 0]
    assert _attempts(tmp_path, "cause") == ["preempted", "preempted", "bug", "done"]
    decisions = [f"restart in {seconds} s" for seconds in ("0.001", "0.002", "0.004")]
    assert _attempts(tmp_path, "decision") == [*decisions, "end: nothing is left to do"]
    assert _attempts(tmp_path, "log") == [[f"error {number}"] for number in range(4)]
    assert _attempts(tmp_path, "command") == [command] * 4
    printed = capfd.readouterr()
    assert printed.out == "attempt 0\nattempt 1\nattempt 2\nattempt 3\n"
    assert printed.err == "error 0\nerror 1\nerror 2\nerror 3\n"
    assert "attempt 3: bug after" in caplog.text


def test_the_wait_is_short_again_after_a_long_attempt(tmp_path: Path) -> None:
    # Every attempt lasts longer than the longest wait.
    command = _program_with_ends(tmp_path, 1, 1, 0)
    supervise(
        command, max_restarts=9, log_dir=tmp_path, backoff_seconds=0.001, max_backoff_seconds=0.002
    )
    assert _attempts(tmp_path, "decision")[:2] == ["restart in 0.001 s", "restart in 0.001 s"]


def test_without_restarts_left_the_last_crashs_code_is_returned(tmp_path: Path) -> None:
    command = _program_with_ends(tmp_path, 1, 75, 7)
    assert supervise(command, max_restarts=1, log_dir=tmp_path, backoff_seconds=0.001) == 7
    assert _attempts(tmp_path, "decision")[-1] == "end: no restart is left of 1"


def test_a_killed_run_is_restarted(tmp_path: Path) -> None:
    command = _program_with_ends(tmp_path, -9, 0)
    assert supervise(command, max_restarts=1, log_dir=tmp_path, backoff_seconds=0.001) == 0
    assert _attempts(tmp_path, "exit_code") == [-9, 0]


def test_death_by_a_signal_that_ends_it_is_returned_as_1(tmp_path: Path) -> None:
    assert supervise(_program_with_ends(tmp_path, -11), max_restarts=0, log_dir=tmp_path) == 1


@pytest.mark.parametrize(
    "code", [code for code in ExitCode if classify_exit_code(code)[1] is Decision.END]
)
def test_an_error_that_a_restart_does_not_help_keeps_its_code(code: int, tmp_path: Path) -> None:
    assert supervise(_program_with_ends(tmp_path, code), max_restarts=9, log_dir=tmp_path) == code
    assert _attempts(tmp_path, "exit_code") == [code]


def test_a_run_that_max_time_stopped_is_not_restarted(tmp_path: Path) -> None:
    program = "import sys; print('stopped by trainer.max_time=2 h', file=sys.stderr); sys.exit(75)"
    assert supervise([sys.executable, "-S", "-c", program], max_restarts=3, log_dir=tmp_path) == 75
    assert _attempts(tmp_path, "decision") == ["end: trainer.max_time is over"]


def test_a_mistake_in_the_arguments_leaves_nothing_behind(tmp_path: Path) -> None:
    assert supervise(_program_with_ends(tmp_path, 2), max_restarts=9, log_dir=tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()


# Ends with the next exit code in its second argument; at "+" the run has begun: it gets the
# manifest in its third one.
_BEGINS = """
import os, sys
from pathlib import Path

run, ends, manifest, *once = sys.argv[1:]
count = Path(run, "count")
number = len(count.read_text()) if count.exists() else 0
count.write_text("." * (number + 1))
end = ends.split(",")[number]
if end.endswith("+"):
    os.replace(manifest, Path(run, "manifest.json"))
sys.exit(int(end.rstrip("+")))
"""


@pytest.mark.parametrize("own_log_dir", [False, True])
def test_until_begun_arguments_are_used_until_a_run_begins(
    tmp_path: Path, own_log_dir: bool
) -> None:
    run = tmp_path / "run"
    directory = RunDirectory(str(run), TrainerConfig())
    directory.write_record(ExperimentConfig(), "mine", "train", {})  # of an earlier start
    before = (run / "manifest.json").read_bytes()
    directory.write_record(ExperimentConfig(), "mine", "train", {})
    (run / "manifest.json").replace(tmp_path / "begun.json")
    (run / "manifest.json").write_bytes(before)

    log_dir = tmp_path / "other" if own_log_dir else run
    arguments = [str(run), "75,1,75+,75,0", str(tmp_path / "begun.json")]
    command = [sys.executable, "-S", "-c", _BEGINS, *arguments]
    first_arguments = ["--from_step=40"]
    code = supervise(
        command,
        max_restarts=1,
        log_dir=log_dir,
        backoff_seconds=0.001,
        first_attempt_arguments=first_arguments,
        run_dir=run if own_log_dir else None,
    )

    assert code == 0
    commands = [[*command, *first_arguments]] * 3 + [command] * 2
    assert _attempts(log_dir, "command") == commands


def test_records_follow_those_of_an_earlier_supervisor(tmp_path: Path) -> None:
    append_json_line(tmp_path / "attempts.jsonl", {"exit_code": 130})
    supervise(_program_with_ends(tmp_path, 0), max_restarts=0, log_dir=tmp_path)
    assert _attempts(tmp_path, "exit_code") == [130, 0]


def test_a_record_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_dir = tmp_path / "file"
    log_dir.write_text("")
    program = _program_with_ends(tmp_path, 6)

    assert supervise(program, max_restarts=9, log_dir=log_dir) == 6
    assert "attempts.jsonl cannot be written" in caplog.text


def test_a_remote_log_dir_is_refused() -> None:
    with pytest.raises(UsageError, match="'gs://bucket/run' is a remote folder; mount it"):
        supervise(["true"], max_restarts=1, log_dir="gs://bucket/run")


@pytest.mark.parametrize(
    ("number", "on_signal", "grace", "expected", "recorded"),
    [
        (signal.SIGTERM, "lambda *_: sys.exit(75)", 60.0, 75, 75),
        (signal.SIGINT, "lambda *_: sys.exit(130)", 60.0, 130, 130),
        (signal.SIGHUP, "lambda *_: sys.exit(75)", 60.0, 75, 75),
        (signal.SIGTERM, "lambda *_: sys.exit(0)", 60.0, 0, 0),
        (signal.SIGTERM, "signal.SIG_IGN", 0.2, 75, -9),
        (signal.SIGINT, "signal.SIG_DFL", 60.0, 130, -2),
    ],
)
def test_a_signal_reaches_the_command_and_ends_the_supervisor(
    tmp_path: Path,
    number: signal.Signals,
    on_signal: str,
    grace: float,
    expected: int,
    recorded: int,
) -> None:
    # The child has the signal sent to us, when it is ready for it.
    program = f"""
import os, signal, sys, time
signal.signal({int(number)}, {on_signal})
os.kill(os.getppid(), {int(number)})
time.sleep(60)
"""
    handler = signal.getsignal(number)
    command = [sys.executable, "-S", "-c", program]

    assert supervise(command, max_restarts=9, log_dir=tmp_path, grace_seconds=grace) == expected
    assert _attempts(tmp_path, "exit_code") == [recorded]
    assert _attempts(tmp_path, "decision") == [f"end: asked to stop by {number.name}"]
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGINT])
def test_a_hang_up_decides_if_an_interrupt_comes_with_it(
    tmp_path: Path, first: signal.Signals
) -> None:
    program = f"""
import os, signal, time
for number in sorted({{signal.SIGHUP, signal.SIGINT}}, key=lambda number: number != {int(first)}):
    signal.signal(number, signal.SIG_IGN)
    os.kill(os.getppid(), number)
    time.sleep(0.2)
time.sleep(60)
"""
    command = [sys.executable, "-S", "-c", program]
    code = supervise(command, max_restarts=9, log_dir=tmp_path, grace_seconds=1.0)

    assert code == ExitCode.PREEMPTED
    assert _attempts(tmp_path, "decision") == ["end: asked to stop by SIGHUP"]


def test_the_process_of_a_supervisor_has_no_tensorflow(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SUPERVISOR, tmp_path, *_program_with_ends(tmp_path, 0)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "attempt 0\nFalse\n"


def test_a_supervisor_stopped_during_a_wait_starts_no_attempt(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SUPERVISOR, tmp_path, *_program_with_ends(tmp_path, 1)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stderr is not None
        assert supervisor.stderr.readline() == "error 0\n"
        assert supervisor.stderr.readline().endswith("; restart in 1e+06 s\n")
        supervisor.send_signal(signal.SIGTERM)

    assert supervisor.returncode == 75
    assert _attempts(tmp_path, "exit_code") == [1]


def test_children_of_the_command_end_with_it(tmp_path: Path) -> None:
    program = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
"""
    supervise([sys.executable, "-S", "-c", program], max_restarts=0, log_dir=tmp_path)
    pid = int((tmp_path / "pid").read_text())

    def is_running() -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    wait_until(lambda: not is_running())
    assert not is_running()


def test_a_process_that_left_the_group_does_not_hold_up_the_end(tmp_path: Path) -> None:
    program = f"""
import subprocess
away = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(away.pid))
"""
    begin = time.monotonic()
    supervise([sys.executable, "-S", "-c", program], max_restarts=0, log_dir=tmp_path)

    assert time.monotonic() - begin < 60

    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
