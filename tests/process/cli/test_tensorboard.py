"""`trainer-kit tensorboard`: the real server, on the logs of jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.builders import wait_until
from trainer_kit.cli.main import main

ROOT = Path(__file__).parents[3]


def _write_events(folder: Path) -> None:
    writer = EventFileWriter(str(folder))
    writer.add_event(Event(step=1))
    writer.close()


def _read_runs(url: str) -> set[str]:
    """Returns the names of the runs that the server shows."""
    with urllib.request.urlopen(f"{url}data/runs", timeout=10) as answer:
        return set(json.loads(answer.read()))


def test_running_jobs_and_new_ones_are_served_on_loopback(tmp_path: Path) -> None:
    _write_events(tmp_path / "job_1" / "logs" / "train")
    checkpoints = tmp_path / "job_1" / "checkpoints"
    checkpoints.mkdir()
    heartbeat = {"step": 7, "phase": "train", "ended": None, "started": "", "beat": ""}
    process = {"host": os.uname().nodename, "pid": os.getpid()}
    (checkpoints / "heartbeat.json").write_text(json.dumps({**process, **heartbeat}))
    arguments = ["tensorboard", str(tmp_path), "--port=0"]
    command = [sys.executable, "-m", "trainer_kit.cli.main", *arguments]
    # TensorBoard reads local files without TensorFlow, whose import takes most of the time until it
    # serves.
    without = tmp_path / "without"
    without.mkdir()
    (without / "tensorflow.py").write_text("raise ImportError\n")
    environment = {**os.environ, "PYTHONPATH": f"{without}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if address := re.search(r"at (http://\S+/)", line):
                    break
            text = "".join(lines)
            assert address, text
            assert re.search(r"job_1/checkpoints +running +7 ", text)
            url = address[1]
            assert url.startswith(("http://127.0.0.1:", "http://localhost:"))

            wait_until(lambda: _read_runs(url) == {"job_1/logs/train"}, seconds=30)
            _write_events(tmp_path / "job_2" / "logs" / "train")
            wait_until(lambda: "job_2/logs/train" in _read_runs(url), seconds=30)

            process.send_signal(signal.SIGTERM)
            process.wait(20)
        finally:
            # Otherwise the context would wait for a server after a failure.
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gs://bucket/tmp"], "remote folder"),
        (["missing"], "there is no folder missing"),
        ([".", "--port=70000"], "70000 is not a port"),
    ],
)
def test_mistakes_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tensorboard", *arguments]) == 2
    assert message in capsys.readouterr().err
