"""The pipeline of `trainer-kit render kfp`: the script around each command, since KFP retries after every exit code."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.cli.manifests import job, kfp

# Prints a line, and ends like a preempted run when it is asked to stop.
_SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("started", flush=True)
time.sleep(60)
"""


def _pipeline(command: tuple[str, ...], mount: Path) -> dict[str, Any]:
    """Returns the values of the constants of a pipeline program."""
    text = kfp.render(job.Job("mine", command, f"{mount}/mine", f"{mount}/mine", image="mine:latest"))
    assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}  # type: ignore[attr-defined]


def _counting(folder: Path, code: int) -> tuple[str, ...]:
    """Returns a command that counts its starts and ends with `code`."""
    return ("sh", "-c", f"echo started >> {folder}/starts; exit {code}")


@pytest.mark.parametrize(("code", "starts"), [(0, 2), (75, 2), (7, 2), (1, 2), (2, 1), (3, 1), (5, 1)])
def test_kubeflow_repeats_no_attempt_in_vain(code: int, starts: int, tmp_path: Path) -> None:
    script = _pipeline((), tmp_path)["RUN_ONCE"]
    for _ in range(2):
        done = subprocess.run(["sh", "-c", script, "train", "pipeline-1", *_counting(tmp_path, code)])
        assert done.returncode == code
    assert len((tmp_path / "starts").read_text().split()) == starts


def test_kubeflow_hands_sigterm_on(tmp_path: Path) -> None:
    script = ["sh", "-c", _pipeline((), tmp_path)["RUN_ONCE"], "train", "pipeline-1"]
    with subprocess.Popen([*script, sys.executable, "-c", _SAVES], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 75


def test_a_command_is_a_list_of_the_program() -> None:
    odd = ("printf", "%s\\n", "--a=it's $HOME", '--b="x"', "--c=\\d", "--d={n}")
    text = kfp.render(job.Job("mine", odd, "/runs/mine", "/runs/mine"))
    parts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    assert set(odd) <= set(parts)
