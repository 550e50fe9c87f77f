"""`trainer-kit doctor fuse`: the setting it prints, why steps cannot be fused, and that it writes nothing."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_kit.cli.doctor_fuse import _check_fuse_steps, _line, _print_timings
from trainer_kit.errors import UsageError
from trainer_kit.testing import tiny_experiment
from trainer_kit.training import fuse_timing
from trainer_kit.training.fuse_timing import FuseTiming

Command = Callable[..., subprocess.CompletedProcess[str]]

_FILE = '''
import tensorflow as tf

import trainer_kit
from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment


@trainer_kit.configclass
class PythonConfig(LinearConfig):
    pass


@trainer_kit.register_task(PythonConfig)
class PythonTask(LinearTask):
    def build_losses(self, labels, model_outputs, aux_losses=None):
        loss = super().build_losses(labels, model_outputs, aux_losses)
        return loss + 0 * tf.ensure_shape(tf.py_function(lambda: 1.0, [], tf.float32), [])


@trainer_kit.register_experiment("tiny")
def tiny():
    """A tiny task."""
    return linear_experiment(steps_per_loop=20, summary_interval=20)


@trainer_kit.register_experiment("python_step")
def python_step():
    """A tiny task whose step runs Python."""
    return linear_experiment().replace(task=PythonConfig())
'''


@pytest.fixture
def experiments(here: Path) -> Path:
    """A folder with a module of experiments."""
    (here / "fused_experiments.py").write_text(_FILE)
    return here


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_both_rates_are_measured_and_no_file_is_written(
    trainer_kit: Command, experiments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_timing, "_SECONDS", 0.002)  # of each of the ten timings of a number
    before = _names(experiments)
    given = ("--import_module=fused_experiments.py", "--fuse_steps=5")
    done = trainer_kit("doctor", "fuse", "tiny", *given)
    assert done.returncode == 0, done.stderr
    rates = r"\d[\d.]* times the rate of separate steps \([\d,.]+ against [\d,.]+ steps/s\)"
    assert re.search(rf"^trainer\.fuse_steps=5 +{rates}$", done.stdout, re.MULTILINE), done.stdout
    assert "the rates include the waits for batches" in done.stdout
    assert _names(experiments) == before


@pytest.mark.usefixtures("experiments")
def test_steps_that_cannot_be_fused_are_no_failure(trainer_kit: Command) -> None:
    done = trainer_kit("doctor", "fuse", "python_step", "--import_module=fused_experiments.py")
    assert done.returncode == 0, done.stderr
    refused = "trainer.fuse_steps=1     the steps cannot be fused: XLA cannot compile the training step"
    assert done.stdout.startswith(refused)


class _Measured:
    """A timer with known timings."""

    def __init__(self, **gains: float) -> None:
        self._gains = gains

    def candidate(self) -> int:
        return 20

    def time(self, fuse_steps: int) -> FuseTiming:
        return FuseTiming(fuse_steps, self._gains[f"of_{fuse_steps}"] * 12345.6, 12345.6)


def test_a_gain_within_the_noise_does_not_pay(capsys: pytest.CaptureFixture[str]) -> None:
    _print_timings(_Measured(of_20=1.04), [])  # type: ignore[arg-type]
    assert "trainer.fuse_steps=1     fusing steps does not make training faster here" in capsys.readouterr().out
    _print_timings(_Measured(of_20=1.04, of_10=1.06), [10, 20])  # type: ignore[arg-type]
    first, second, told = capsys.readouterr().out.splitlines()
    assert first.startswith("trainer.fuse_steps=10 ") and second.startswith("trainer.fuse_steps=20 ")
    assert "the rates include the waits for batches" in told


def test_a_line_has_the_setting_the_gain_and_both_rates() -> None:
    line = "trainer.fuse_steps=20    3.4 times the rate of separate steps (12,300 against 3,620 steps/s)"
    assert _line(FuseTiming(20, 12345.6, 3615.4)) == line
    slow = "trainer.fuse_steps=100   0.23 times the rate of separate steps (2.58 against 11.20 steps/s)"
    assert _line(FuseTiming(100, 2.584, 11.2)) == slow


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_number_that_no_loop_can_have_in_a_program_is_refused(steps: int) -> None:
    _check_fuse_steps([2, 5], tiny_experiment())
    with pytest.raises(
        UsageError, match=rf"--fuse_steps: must be from 2 to 5 \(trainer\.steps_per_loop\), not {steps}"
    ):
        _check_fuse_steps([5, steps], tiny_experiment())
