"""Whole runs under the supervisor, with small programs as children: attempts, what is recorded, what is returned."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_kit import supervise
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.errors import UsageError
from trainer_kit.files import append_line, read_lines
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.run_lock import HEARTBEAT, RunLock
from trainer_kit.run.supervisor import child_process
from trainer_kit.run.supervisor.restart_rules import OUTCOMES, Decision

# Ends as its arguments say, "exit code@step" for each attempt; at step "?" without a heartbeat; after "+" with a new
# checkpoint of that step. The heartbeat is a real one of this process with another step: a child would import for long.
_SCRIPT = """
import json, os, sys
from pathlib import Path

folder, heartbeat, *ends = sys.argv[1:]
done = Path(folder, "done")
number = len(done.read_text()) if done.exists() else 0
done.write_text("." * (number + 1))
code, _, step = ends[min(number, len(ends) - 1)].partition("@")
step, _, saved = step.partition("+")
if saved:
    Path(folder, f"ckpt-{saved}.index").touch()
print(f"run {number}")
if step != "?":
    now = {**json.loads(heartbeat), "step": int(step), "beat": f"of attempt {number}"}
    Path(folder, "heartbeat.json").write_text(json.dumps(now))
if int(code) < 0:
    os.kill(os.getpid(), -int(code))
print("its end", file=sys.stderr)
sys.exit(int(code))
"""

Ends = Callable[..., int]


@pytest.fixture(scope="module")
def heartbeat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a heartbeat."""
    folder = tmp_path_factory.mktemp("heartbeat")
    with RunLock(folder, lambda: ("train", 1)):
        return (folder / HEARTBEAT).read_text()


@pytest.fixture
def ends(tmp_path: Path, heartbeat: str) -> Ends:
    """Supervises the script, with these ends; the run's folder is tmp_path."""

    def supervised(*ends: str, max_restarts: int = 5, **arguments: Any) -> int:
        command = [sys.executable, "-S", "-c", _SCRIPT, str(tmp_path), heartbeat, *ends]
        arguments = {"backoff_seconds": 0.001, "grace_seconds": 5.0, **arguments}
        return supervise(command, max_restarts=max_restarts, log_dir=tmp_path, **arguments)

    return supervised


def _exit(code: int) -> list[str]:
    return [sys.executable, "-S", "-c", f"raise SystemExit({code})"]


def _attempts(folder: Path, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(record[key] for key in keys) for record in read_lines(folder / "attempts.jsonl")]


def test_two_preemptions_and_a_crash_take_four_attempts(
    ends: Ends, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends("75@10", "75@20", "1@25", "0@30", max_restarts=1) == 0
    assert _attempts(tmp_path, "attempt", "exit_code", "cause", "step", "decision") == [
        (1, 75, "preempted", 10, "restart at once"),
        (2, 75, "preempted", 20, "restart at once"),
        (3, 1, "crashed", 25, "restart 1 of 1 in 0.001 s"),
        (4, 0, "done", 30, "end"),
    ]
    assert [sorted(lines) for (lines,) in _attempts(tmp_path, "log")] == [["its end", f"run {n}"] for n in range(4)]
    printed = capfd.readouterr()
    assert printed.out == "run 0\nrun 1\nrun 2\nrun 3\n"
    assert printed.err.count("its end\n") == 4


def test_a_record_tells_the_command_and_when_it_ran(tmp_path: Path) -> None:
    supervise(_exit(0), max_restarts=0, log_dir=tmp_path / "made")
    ((command, started, seconds),) = _attempts(tmp_path / "made", "command", "started", "seconds")
    assert command == _exit(0)
    assert started.endswith("+00:00") and 0 < seconds < 60


def test_two_crashes_at_the_same_step_end_the_supervisor(
    ends: Ends, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert ends("1@40") == 1
    assert _attempts(tmp_path, "step") == [(40,), (40,)]
    assert "attempt 2: crashed at step 40 after" in caplog.text
    assert "the second crash in a row at step 40; another attempt would fail there too" in caplog.text


def test_each_decision_is_one_line_of_the_log(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ends("75@1", "7@2", "5@3")
    told = [record.getMessage() for record in caplog.records if record.name.startswith("trainer_kit.run.supervisor")]
    assert [line.split(" after ")[0] for line in told] == [
        "attempt 1: preempted at step 1",
        "attempt 2: stalled at step 2",
        "attempt 3: data at step 3",
    ]


def test_without_restarts_left_the_last_crashs_code_is_returned(ends: Ends, tmp_path: Path) -> None:
    assert ends("1@1", "75@2", "7@3", max_restarts=1) == 7
    assert _attempts(tmp_path, "decision")[-1] == ("end: no restart is left of 1",)


def test_a_run_that_is_killed_is_restarted_and_its_step_is_known(ends: Ends, tmp_path: Path) -> None:
    assert ends("-9@5", "0@9") == 0
    assert _attempts(tmp_path, "exit_code", "cause", "step") == [(-9, "killed by SIGKILL", 5), (0, "done", 9)]


def test_death_by_a_signal_that_ends_it_is_returned_as_1(ends: Ends) -> None:
    assert ends("-11@5", max_restarts=0) == 1


@pytest.mark.parametrize("code", [code for code, (_, decision) in OUTCOMES.items() if decision is Decision.END])
def test_what_a_restart_does_not_help_ends_with_its_own_code(code: int, tmp_path: Path) -> None:
    assert supervise(_exit(code), max_restarts=9, log_dir=tmp_path) == code
    assert _attempts(tmp_path, "exit_code") == [(code,)]


def test_a_mistake_in_the_arguments_leaves_nothing_behind(tmp_path: Path) -> None:
    assert supervise(_exit(2), max_restarts=9, log_dir=tmp_path / "run") == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", [None, '{"step": 7', '{"step": 7}', "[]"])
def test_a_heartbeat_that_is_missing_or_torn_tells_no_step(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "heartbeat.json").write_text(text)
    supervise(_exit(0), max_restarts=0, log_dir=tmp_path)
    assert _attempts(tmp_path, "step") == [(None,)]


def test_a_heartbeat_of_the_attempt_before_tells_no_step(ends: Ends, tmp_path: Path) -> None:
    # The second crash comes before a heartbeat: it is not taken for another one at step 40.
    assert ends("1@40", "1@?", "0@50") == 0
    assert _attempts(tmp_path, "step") == [(40,), (None,), (50,)]


def test_a_checkpoint_may_have_a_later_step_than_the_heartbeat(ends: Ends, tmp_path: Path) -> None:
    # Both crash before their second heartbeat, but the second one after a later checkpoint.
    assert ends("-6@0+30", "-6@0+60", "0@90") == 0
    assert _attempts(tmp_path, "step") == [(30,), (60,), (90,)]


def test_two_crashes_after_the_same_checkpoint_end_it(ends: Ends, tmp_path: Path) -> None:
    assert ends("-6@0+30", "-6@0", "0@90") == 1
    assert _attempts(tmp_path, "step") == [(30,), (30,)]


def test_the_step_may_come_from_elsewhere(tmp_path: Path) -> None:
    steps = itertools.count(100)
    supervise(_exit(1), max_restarts=2, log_dir=tmp_path, backoff_seconds=0.001, step=lambda: next(steps))
    assert _attempts(tmp_path, "step") == [(100,), (101,), (102,)]


def test_crashes_count_where_no_step_is_ever_told(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"log_dir": tmp_path, "backoff_seconds": 0.001, "step": lambda: None}
    assert supervise(_exit(1), max_restarts=3, **arguments) == 1
    assert _attempts(tmp_path, "decision")[1:] == [
        ("restart 2 of 3 in 0.002 s",),
        ("restart 3 of 3 in 0.004 s",),
        ("end: no restart is left of 3",),
    ]


# Ends as its third argument says, an exit code for each attempt; "+": when the run in its first one has begun, with the
# manifest in its second.
_BEGINNING = """
import os, sys
from pathlib import Path

folder, begun, ends, *once = sys.argv[1:]
done = Path(folder, "done")
number = len(done.read_text()) if done.exists() else 0
done.write_text("." * (number + 1))
end = ends.split(",")[number]
if end.endswith("+"):
    os.replace(begun, Path(folder, "manifest.json"))
sys.exit(int(end.rstrip("+")))
"""


def _manifests(run: Path) -> tuple[bytes, bytes]:
    """The real manifests of a run that was started once, and of one that was started twice."""
    found = []
    for _ in range(2):
        RunDirectory(str(run), TrainerConfig()).write_record(ExperimentConfig(), "mine", "train", {})
        found.append((run / "manifest.json").read_bytes())
    return found[0], found[1]


@pytest.mark.parametrize("apart", [False, True])
def test_until_begun_arguments_are_used_until_a_run_begins(tmp_path: Path, apart: bool) -> None:
    run, begun = tmp_path / "run", tmp_path / "begun.json"
    log_dir = tmp_path / "other" if apart else run
    before, after = _manifests(run)
    (run / "manifest.json").write_bytes(before)  # of an earlier start
    begun.write_bytes(after)
    command = [sys.executable, "-S", "-c", _BEGINNING, str(run), str(begun), "75,1,75+,75,0"]
    arguments: dict[str, Any] = {"run_dir": run} if apart else {}
    once = ["--from_step=40"]
    assert supervise(
        command, max_restarts=1, log_dir=log_dir, backoff_seconds=0.001, until_begun=once, **arguments
    ) == 0  # fmt: skip
    commands = [given for (given,) in _attempts(log_dir, "command")]
    assert commands == [[*command, *once], [*command, *once], [*command, *once], command, command]


def test_records_follow_those_of_an_earlier_supervisor(tmp_path: Path) -> None:
    append_line(tmp_path / "attempts.jsonl", {"attempt": 1, "exit_code": 130})
    supervise(_exit(0), max_restarts=0, log_dir=tmp_path)
    assert _attempts(tmp_path, "attempt", "exit_code") == [(1, 130), (1, 0)]


_MOVED = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1]).resolve()
folder.mkdir()
(folder / "ckpt-10.index").touch()
time.sleep(0.5)
folder.rename(folder.with_name("moved"))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [1, 75])
def test_a_run_whose_folder_was_moved_is_not_restarted(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_WATCH_SECONDS", 0.05)  # the folder is looked at while the run has it
    (tmp_path / "latest").symlink_to("run")
    command = [sys.executable, "-S", "-c", _MOVED, str(tmp_path / "latest"), str(code)]
    assert supervise(command, max_restarts=3, log_dir=tmp_path / "latest", backoff_seconds=0.001) == 6
    assert f"{tmp_path}/run was moved or removed during the run: it is now at {tmp_path}/moved" in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_record_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert supervise(_exit(6), max_restarts=9, log_dir=tmp_path / "file") == 6
    assert "attempts.jsonl cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ([], {}, r"\[\] is not a list of a program and its arguments"),
        ("python train.py", {}, "'python train.py' is not a list of a program and its arguments"),
        (["true"], {"max_restarts": -1}, "max_restarts: -1 is not a number of restarts; give 0 or more"),
        (["true"], {"log_dir": "gs://bucket/run"}, "'gs://bucket/run' is a remote folder; only local and mounted"),
        (["no-such-program"], {}, "'no-such-program' cannot be started: No such file"),
    ],
)
def test_arguments_that_are_not_allowed_are_told(
    command: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        supervise(command, **{"max_restarts": 1, "log_dir": tmp_path, **changes})


def test_outside_the_main_thread_it_fails_with_nothing_open(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def call() -> None:
        try:
            supervise(["true"], max_restarts=1, log_dir=tmp_path)
        except Exception as error:
            errors.append(error)

    before = sorted(os.listdir("/proc/self/fd"))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(errors[0], UsageError) and "only the main thread of a process can" in str(errors[0])
    assert sorted(os.listdir("/proc/self/fd")) == before


_SUPERVISOR = """
import logging, sys
from trainer_kit import supervise

logging.basicConfig(level=logging.INFO, format="%(message)s")
log_dir, backoff, *command = sys.argv[1:]
code = supervise(command, max_restarts=9, log_dir=log_dir, grace_seconds=60.0, backoff_seconds=float(backoff),
                 most_backoff_seconds=1e6)
print(" tensorflow" if "tensorflow" in sys.modules else " light")
sys.exit(code)
"""


def _supervisor(folder: Path, child: str, backoff: float = 0.001) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{child}"]
    return subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(folder), str(backoff), *command],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("number", "on_signal", "grace", "expected", "recorded"),
    [
        (signal.SIGTERM, "lambda *_: sys.exit(75)", 60.0, 75, 75),
        (signal.SIGINT, "lambda *_: sys.exit(130)", 60.0, 130, 130),
        (signal.SIGHUP, "lambda *_: sys.exit(75)", 60.0, 75, 75),
        (signal.SIGTERM, "lambda *_: sys.exit(1)", 60.0, 1, 1),
        (signal.SIGTERM, "lambda *_: sys.exit(0)", 60.0, 0, 0),
        (signal.SIGTERM, "signal.SIG_IGN", 0.2, 75, -9),
        (signal.SIGINT, "signal.SIG_DFL", 60.0, 130, -2),
    ],
)
def test_a_stopped_supervisor_stops_its_child_and_ends(
    tmp_path: Path, number: signal.Signals, on_signal: str, grace: float, expected: int, recorded: int
) -> None:
    # The child has the signal sent to us, when it is ready for it.
    lines = (f"signal.signal({int(number)}, {on_signal})", f"os.kill(os.getppid(), {int(number)})", "time.sleep(60)")
    command = [sys.executable, "-S", "-c", "\n".join(("import os, signal, sys, time", *lines))]
    assert supervise(command, max_restarts=9, log_dir=tmp_path, grace_seconds=grace) == expected
    assert _attempts(tmp_path, "exit_code", "decision") == [(recorded, f"end: asked to stop by {number.name}")]


def test_a_supervisors_own_process_is_light_and_shows_all(tmp_path: Path) -> None:
    on_signal = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))"
    supervisor = _supervisor(tmp_path, f"{on_signal}\nprint('ready', end='')\ntime.sleep(60)")
    assert supervisor.stdout is not None
    assert supervisor.stdout.read(5) == "ready"  # without the end of a line, while the child goes on
    supervisor.send_signal(signal.SIGTERM)
    output, log = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 75, log
    assert _attempts(tmp_path, "exit_code", "decision") == [(75, "end: asked to stop by SIGTERM")]
    assert output == " light\n"


def test_a_supervisor_stopped_during_a_wait_starts_no_attempt(tmp_path: Path) -> None:
    supervisor = _supervisor(tmp_path, "sys.exit(1)", backoff=100_000)
    assert supervisor.stderr is not None
    assert supervisor.stderr.readline().endswith("; restart 1 of 9 in 100000 s\n")
    supervisor.send_signal(signal.SIGTERM)
    _, log = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 75
    assert log == "attempt 2 is not started: asked to stop by SIGTERM\n"
    assert json.loads((tmp_path / "attempts.jsonl").read_text())["exit_code"] == 1


def test_a_run_whose_max_time_is_over_is_not_started_again(tmp_path: Path) -> None:
    over = ["-S", "-c", "print('error: stopped by trainer.max_time=2 h at step 7'); raise SystemExit(75)"]
    assert supervise([sys.executable, *over], max_restarts=3, log_dir=tmp_path) == 75
    assert _attempts(tmp_path, "exit_code", "decision") == [(75, "end: trainer.max_time is over")]
