"""`trainer-kit doctor resume`, on a run that is the same after a kill and on one that cannot be."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from tests.fork_server import Child, ForkServer
from tests.process.cli.logged_run import train_with_log
from trainer_kit.cli.doctor import doctor_resume
from trainer_kit.cli.main import build_parser
from trainer_kit.errors import UsageError

Command = Callable[..., subprocess.CompletedProcess[str]]

_FILE = '''
import os

import tensorflow as tf

import trainer_kit
from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment


@trainer_kit.configclass
class DrawnConfig(LinearConfig):
    pass


@trainer_kit.register_task(DrawnConfig)
class DrawnTask(LinearTask):
    def build_losses(self, labels, model_outputs, aux_losses=None):
        noise = tf.py_function(lambda: os.urandom(1)[0] / 256, [], tf.float32)
        return super().build_losses(labels, model_outputs, aux_losses) * (1 + tf.reshape(noise, ()))


def small():
    # With fewer steps a busy machine may kill too late.
    return linear_experiment(
        train_steps=800, steps_per_loop=20, summary_interval=20, checkpoint_interval=100,
        validation_interval=400, best_checkpoint_eval_metric="accuracy",
    )


@trainer_kit.register_experiment("sound")
def sound():
    """A model with dropout."""
    return small().replace(task=LinearConfig(dropout=0.2))


@trainer_kit.register_experiment("drawn")
def drawn():
    """One with a loss that no two runs have alike."""
    return small().replace(task=DrawnConfig())
'''


@pytest.fixture
def experiments(here: Path) -> Path:
    """A file with a sound experiment and one whose numbers come from the machine's noise."""
    (here / "experiments_here.py").write_text(_FILE)
    return here


class _Forked:
    """What doctor asks of a process, of one that begins with TensorFlow imported."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.returncode = 0

    def poll(self) -> int | None:
        return None if self._child.alive else self.wait()

    def wait(self, timeout: float | None = None) -> int:
        try:
            self.returncode = self._child.wait(timeout or 100.0).code
        except TimeoutError as error:
            raise subprocess.TimeoutExpired("train", timeout or 100.0) from error
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._child.kill(number)

    def kill(self) -> None:
        self._child.kill()


@pytest.fixture
def runs_in_forks(experiments: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The runs of doctor by the fork server, with the arguments that doctor gives them."""
    with ForkServer() as server:

        def start(command: list[str], folder: Path) -> _Forked:
            log = doctor_resume._get_log_path(folder)
            log.touch()  # it is read at once
            child = server.start(train_with_log, str(log), *command[3:], folder=str(experiments))
            return _Forked(child)

        monkeypatch.setattr(doctor_resume, "_start", start)
        yield


@pytest.mark.usefixtures("runs_in_forks")
def test_a_run_that_resumes_exactly_is_told_so_with_each_kill(trainer_kit: Command) -> None:
    options = ("--import_module=experiments_here.py", "--kills=1", "--seed=1", "--signal=kill")

    done = trainer_kit("doctor", "resume", "sound", *options)

    assert done.returncode == 0, done.stderr
    assert re.search(r"^uninterrupted: 800 steps", done.stdout, re.MULTILINE)
    kill = re.search(
        r"^kill 1: SIGKILL .* at step (\d+); exit code -9; resumed from step (\d+)",
        done.stdout,
        re.MULTILINE,
    )
    assert kill is not None, done.stdout
    killed_at, resumed_from = map(int, kill.groups())
    assert 0 <= resumed_from <= killed_at < 800
    assert done.stdout.endswith("the same, bit by bit: 1 kills, 1 restarts\n")


@pytest.mark.usefixtures("runs_in_forks")
def test_a_run_with_unseeded_noise_is_reported_to_differ(trainer_kit: Command) -> None:
    options = ("--import_module=experiments_here.py", "--kills=1", "--keep")

    done = trainer_kit("doctor", "resume", "drawn", *options)

    assert (done.returncode, done.stderr) == (1, "")
    for message in (
        "the run says: the training step uses EagerPyFunc, whose state is not in a checkpoint",
        "first different at step 20, before any resume: "
        "the experiment computes other numbers each time",
        "different: newest checkpoint: model/",
    ):
        assert message in done.stdout
    kept = re.search(r"^kept: (.+)$", done.stdout, re.MULTILINE)
    assert kept is not None
    assert {path.name for path in Path(kept[1]).iterdir()} >= {"uninterrupted", "killed"}
    shutil.rmtree(kept[1])


def test_the_real_command_is_run_and_its_failure_told(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    arguments = ["doctor", "resume", "mine/smal", "--import_module=mine.py"]
    folder = tmp_path / "uninterrupted"
    command = doctor_resume._command(build_parser().parse_args(arguments), folder)

    with pytest.raises(doctor_resume.DoctorError) as error:
        doctor_resume._run_to_end(command, folder)

    message = (
        "the run ended with exit code 2; its last lines:\n  error: --experiment: no experiment is"
        " called 'mine/smal'"
    )
    assert str(error.value).startswith(message)


def test_kills_are_spread_over_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_steps: list[int] = []

    def kill(
        command: object, folder: Path, sent_signal: signal.Signals, step: int, seconds: float
    ) -> doctor_resume.Kill:
        kill_steps.append(step)
        return doctor_resume.Kill(sent_signal, step, seconds, -9, step)

    def read_last_step(folder: Path) -> int:
        return 1000 if folder.name == "uninterrupted" else max(kill_steps, default=0)

    log = tmp_path / "log.txt"
    log.write_text("train | step 1\n" * 100)
    for name, function in {
        "_run_to_end": lambda command, folder: 1.0,
        "_run_until_killed": kill,
        "_last_step": read_last_step,
        "_get_log_path": lambda folder: log,
        "_print_last_kill": lambda kills, folder: [],
        "_report_verdict": lambda *arguments: 0,
    }.items():
        monkeypatch.setattr(doctor_resume, name, function)

    last_steps = []
    for seed in range(20):
        kill_steps.clear()
        options = ["doctor", "resume", "digits", "--kills=10", f"--seed={seed}"]
        doctor_resume._run_with_kills(build_parser().parse_args(options), tmp_path)
        last_steps.append(kill_steps[-1])

    assert sum(last_steps) / len(last_steps) > 800


def test_fewer_kills_than_were_asked_for_prove_nothing(tmp_path: Path) -> None:
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        tf.train.Checkpoint(step=tf.Variable(1)).write(str(folder / "ckpt-1"))
    arguments = argparse.Namespace(kills=2)

    assert doctor_resume._report_verdict(arguments, *folders, 2, [], False) == 0
    message = r"ended before kill 2 of 2, and is the same so far; give it more steps"
    with pytest.raises(UsageError, match=message):
        doctor_resume._report_verdict(arguments, *folders, 1, [], False)


def test_a_wrong_number_of_kills_is_told_before_anything_runs(trainer_kit: Command) -> None:
    done = trainer_kit("doctor", "resume", "mine/small", "--kills=0", "--import_module=mine.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --kills: must be 1 or more, not 0")
