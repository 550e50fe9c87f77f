"""`trainer-kit watch`: what it shows of each state of a run, when it leaves, and that it draws on a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.cli.written_runs import evaluation, write_ledger, write_params, write_process
from trainer_kit.cli.main import main
from trainer_kit.cli.view.liveness import Pulses
from trainer_kit.cli.view.tables import plain
from trainer_kit.cli.watch import Look
from trainer_kit.errors import StorageError
from trainer_kit.process.run_lock import RunLock
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
from trainer_kit.telemetry.report import Report

Command = Callable[..., subprocess.CompletedProcess[str]]
_ROOT = Path(__file__).parents[3]
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"


def _shown(look: Look) -> dict[str, list[str]]:
    """First word of each row -> its words."""
    lines = "\n".join(map(plain, look.tables())).splitlines()
    return {line.split()[0]: line.split() for line in lines}


@contextmanager
def _watching(folder: Path, *arguments: str, terminal: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "trainer_kit.cli.main", "watch", str(folder), "--interval=0.05", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1", "TERM": "xterm-256color"}
    for size in ("COLUMNS", "LINES"):  # which pytest's workers set, and which go before the terminal's own
        environment.pop(size, None)
    output = subprocess.PIPE if terminal is None else terminal
    process = subprocess.Popen(command, env=environment, stdin=terminal, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _read_until(stream: int, text: str, seconds: float = 30) -> str:
    """What is written up to `text`; it has to come."""
    written, give_up = b"", time.monotonic() + seconds
    while text.encode() not in written:
        assert select.select([stream], [], [], give_up - time.monotonic())[0], written.decode()
        part = os.read(stream, 65536)
        assert part, written.decode()
        written += part
    return written.decode()


def test_a_finished_run_is_shown_and_left_at_once(trainer_kit: Command, finished_run: Path) -> None:
    done = trainer_kit("watch", str(finished_run))
    assert (done.returncode, done.stderr) == (0, "")
    processes, training, evaluations = done.stdout.split("\n\n")
    assert processes.splitlines()[0] == f"{finished_run}: finished at step 20"
    trainer = processes.splitlines()[2].split()
    assert trainer[:5] == ["trainer", "ended:", "done", "end", "20/20"] and str(os.getpid()) in trainer
    assert training.splitlines()[2].split()[0] == "20" and training.split()[-1] == "ckpt-20"
    assert [row.split()[0] for row in evaluations.splitlines()[2:]] == ["validation", "fast"]
    assert trainer_kit("watch", str(finished_run), "--once").stdout == done.stdout


def test_a_living_trainer_shows_its_step_and_remaining_time(tmp_path: Path) -> None:
    write_params(tmp_path, train_steps=400, best_checkpoint_eval_metric="accuracy")
    write_ledger(tmp_path, evaluation(100, accuracy=0.75), evaluation(200, accuracy=0.5))
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    metrics = {"training_loss": 0.125}
    writer.write(Report(kind="train", step=200, total_steps=400, metrics=metrics, steps_per_second=50.0))
    writer.close()
    look = Look(tmp_path)
    with RunLock(tmp_path, lambda: ("train", 210)):
        shown = _shown(look)
    assert shown["trainer"][:4] == ["trainer", "alive", "train", "210/400"]
    assert shown["200"] == ["200", "50", "0:00:04", "0.125", "-"]
    assert shown["validation"] == ["validation", "200", "accuracy", "0.5", "100", "0.75"]
    assert not look.over
    assert _shown(look)["trainer"][1:3] == ["ended:", "done"]
    assert not look.over  # it has ended, but is not finished


def test_sidecars_are_shown_by_their_leases_and_are_waited_for(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished_run, folder)
    lease = folder / "evals" / "fast.lease.json"
    write_process(lease, host="far", pid=7, step=20, beat="1", phase="evaluate", ended=None)
    look = Look(folder)
    assert _shown(look)["fast"] == ["fast", "20", "accuracy", *_shown(look)["validation"][3:]]
    processes = plain(look.tables()[0]).splitlines()
    assert processes[-1].split() == ["fast", "alive", "evaluate", "20", "far", "pid", "7"]
    assert not look.over
    write_process(lease, host="far", pid=7, step=None, beat="2", phase="end", ended="done")
    assert plain(look.tables()[0]).splitlines()[-1].split() == ["fast", "ended:", "done", "end", "-", "far", "pid", "7"]
    assert look.over


def test_a_sidecar_called_trainer_is_not_taken_for_the_trainer(tmp_path: Path) -> None:
    beats = {"host": "far", "pid": 7, "phase": "train", "started": "", "ended": None, "beat": "1"}
    write_process(write_params(tmp_path) / "heartbeat.json", **beats, step=3)
    write_process(tmp_path / "evals" / "trainer.lease.json", **{**beats, "ended": "done"})
    rows = plain(Look(tmp_path).tables()[0]).splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [["trainer", "alive"], ["trainer", "ended:"]]


def test_a_trainer_that_falls_silent_is_told_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    look = Look(tmp_path, Pulses(lambda: now[0], lambda: 0.0))
    heartbeat = tmp_path / "heartbeat.json"
    os.utime(write_process(heartbeat, host="far", pid=7, step=3, phase="train", beat="1"), (0, 0))
    assert _shown(look)["trainer"][1] == "alive"
    now[0] = 90.0
    assert _shown(look)["trainer"][1:5] == ["silent", "for", "90", "s"]
    write_process(heartbeat, host="far", pid=7, step=4, phase="train", beat="2")
    assert _shown(look)["trainer"][1:4] == ["alive", "train", "4"]


def test_files_that_come_and_go_while_it_looks_are_no_error(tmp_path: Path) -> None:
    look = Look(tmp_path)
    (line,) = plain(look.tables()[0]).splitlines()
    assert line == f"{tmp_path}: empty; waiting for a trainer to begin (heartbeat.json)"
    for name in ("heartbeat.json", "params.yaml", "final.json", "metrics.jsonl", "evals/a.jsonl", "evals/a.lease.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        for content in (b"", b"{", b"\xff\n", b'{"step": null}\n', b"[]"):
            path.write_bytes(content)
            assert _shown(look)["trainer"][1:3] == ["no", "heartbeat"] or name == "heartbeat.json"
        path.unlink()
    tmp_path.joinpath("evals").rmdir()
    tmp_path.rmdir()
    with pytest.raises(StorageError, match="is gone: somebody removed it, or the run ended before its first step"):
        look.tables()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/evals/validation.jsonl"], "is a file; give the folder of a run"),
        (["{run}/validation"], "validation holds no run; it holds: events.out"),
        (["{run}", "--interval=0"], "--interval: 0 is not a number of seconds above 0"),
        (["{run}", "--interval=nan"], "--interval: nan is not a number of seconds above 0"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(
    capsys: pytest.CaptureFixture[str], finished_run: Path, arguments: list[str], message: str
) -> None:
    assert main(["watch", *(argument.format(run=finished_run) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1


def test_a_run_that_was_stopped_early_is_finished_and_tells_why(tmp_path: Path) -> None:
    write_params(tmp_path, train_steps=40)
    (tmp_path / "final.json").write_text('{"step": 30, "mode": "train", "metrics": {}, "stopped": "enough"}')
    look = Look(tmp_path)
    assert look.tables()[0].title == f"{tmp_path}: stopped early at step 30: enough"
    assert look.over


def test_an_empty_folder_is_waited_for_until_its_run_is_finished(tmp_path: Path) -> None:
    with _watching(tmp_path) as process:
        assert process.stdout is not None
        first = _read_until(process.stdout.fileno(), "waiting for a trainer to begin")
        assert first.startswith(f"{tmp_path}: empty")
        write_process(tmp_path / "heartbeat.json", host="far", pid=7, step=3, phase="train", beat="1")
        assert "alive" in _read_until(process.stdout.fileno(), "far pid 7")
        (tmp_path / "final.json").write_text(json.dumps({"step": 9}))
        write_process(tmp_path / "heartbeat.json", host="far", pid=7, step=9, phase="end", beat="2", ended="done")
        rest = process.communicate(timeout=30)[0].decode()
    assert process.returncode == 0
    assert rest.count("finished at step 9") <= 2 and "ended: done" in rest  # what is new is printed, once


def test_follow_stays_after_the_end_and_ctrl_c_exits_with_0(finished_run: Path) -> None:
    with _watching(finished_run, "--follow") as process:
        assert process.stdout is not None
        _read_until(process.stdout.fileno(), "\nfast ")
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert b"finished" not in out  # nothing was new, nor is there a traceback


def test_a_terminal_is_drawn_over_and_given_back(tmp_path: Path) -> None:
    columns = 30  # fewer than the table has
    write_params(tmp_path, train_steps=400)
    write_ledger(tmp_path, evaluation(100, accuracy=0.123456))
    write_process(tmp_path / "heartbeat.json", host="far", pid=7, step=123456, phase="train", beat="1")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with _watching(tmp_path, terminal=slave) as process:
        os.close(slave)
        first = _read_until(master, "0.123456")
        write_process(tmp_path / "heartbeat.json", host="far", pid=7, step=234567, phase="train", beat="2")
        second = _read_until(master, "234567/400")
        process.send_signal(signal.SIGINT)
        rest = _read_until(master, _SHOW)
        assert process.wait(30) == 0
    os.close(master)
    assert _HIDE in first and "123456/400" in first
    assert "\x1b[2K" in second and "234567/400" in second  # lines are erased, and drawn again
    assert _SHOW in rest and "Traceback" not in rest
    drawn = re.split(r"[\r\n]|\x1b\[2K|\x1b\[1A", first)  # it may have been drawn more than once
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in drawn]
    assert max(map(len, lines)) <= columns


def test_each_of_several_validation_sets_has_a_row(tmp_path: Path) -> None:
    write_params(tmp_path, best_checkpoint_eval_metric="dev|accuracy")
    records = [
        evaluation(5, dataset=name, **{name: {"accuracy": value}}) for name, value in (("dev", 0.5), ("rare", 0.25))
    ]
    write_ledger(tmp_path, *records, evaluation(10, dataset="dev", dev={"accuracy": 0.4}))
    table = plain(Look(tmp_path, Pulses()).tables()[-1]).splitlines()
    rows = [line.split() for line in table if line.startswith("validation")]
    assert rows == [
        ["validation", "dev", "10", "dev|accuracy", "0.4", "5", "0.5"],
        ["validation", "rare", "5", "rare|accuracy", "0.25", "5", "0.25"],
    ]


@pytest.mark.parametrize("metric", ["dev|group|score", "group|score"])  # of a run with the sets, or with only one
def test_a_grouped_metric_is_shown_of_each_validation_set(tmp_path: Path, metric: str) -> None:
    write_params(tmp_path, best_checkpoint_eval_metric=metric)
    values = {"dev": 0.5, "rare": 0.25}
    nested = {name: {"loss": 9.0, "score": 7.0, "group": {"score": value}} for name, value in values.items()}
    write_ledger(tmp_path, *(evaluation(5, dataset=name, **{name: of}) for name, of in nested.items()))
    table = plain(Look(tmp_path, Pulses()).tables()[-1]).splitlines()
    rows = [line.split() for line in table if line.startswith("validation")]
    assert [row[3:] for row in rows] == [
        [f"{name}|group|score", f"{value}", "5", f"{value}"] for name, value in values.items()
    ]
