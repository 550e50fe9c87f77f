"""The trace of a few steps: the file that TensorBoard reads, and a run that goes on whatever the profiler does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.traces import times_traced
from trainer_kit.telemetry.profiler import profiled
from trainer_kit.training.loops.train_loop import LoopParts


class _Squares:
    """A trainer whose steps are one product of matrices each."""

    def __init__(self, step: int = 0) -> None:
        self.global_step, self.strategy = tf.Variable(step, dtype=tf.int64), tf.distribute.get_strategy()
        self.loop_parts = LoopParts(self.global_step)
        self._matrix = tf.Variable(tf.eye(8))
        self._loop = tf.function(self._steps, autograph=False)

    def train(self, num_steps: int) -> None:
        self.loop_parts.run(lambda _, steps, fresh: (int(self._loop(tf.constant(steps))), None), None, num_steps, True)

    def _steps(self, num_steps: tf.Tensor) -> tf.Tensor:
        def step(done: tf.Tensor) -> tuple[tf.Tensor]:
            self._matrix.assign(tf.matmul(self._matrix, self._matrix, name="square"))
            self.global_step.assign_add(1)
            return (done + 1,)

        return tf.while_loop(lambda done: done < num_steps, step, (tf.constant(0),))[0]


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="trainer_kit")
    return caplog


def _run(folder: Path, profile: str, trainer: Any = None, loops: int = 3, writes: bool = True) -> int:
    """Runs loops of ten steps; returns how many products the trace holds."""
    trainer = trainer or _Squares()
    with profiled(trainer, profile, str(folder), writes):
        for _ in range(loops):
            trainer.train(10)
    return times_traced(folder, "square")


@pytest.mark.parametrize(("profile", "steps"), [("4:6", 3), ("7:12", 6), ("25:99", 6)])
def test_the_trace_holds_exactly_the_steps_of_the_window(
    tmp_path: Path, profile: str, steps: int, messages: pytest.LogCaptureFixture
) -> None:
    assert _run(tmp_path, profile) == steps
    assert messages.text.count("\n") == 1 and f"{tmp_path}/plugins/profile" in messages.text


def test_a_run_outside_the_window_logs_that_nothing_is_traced(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    assert _run(tmp_path, "4:6", _Squares(step=6)) == 0
    assert messages.messages == ["profile=4:6: no trace is written, since the run resumes from step 6"]
    assert _run(tmp_path, "40:60") == 0
    assert messages.messages[1:] == ["profile=40:60: no trace is written, since the run ended before step 40"]


def test_a_worker_that_writes_no_trace_splits_its_loops_alike(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    trainer = _Squares()
    assert _run(tmp_path, "4:6", trainer, writes=False) == 0
    assert not messages.messages and not list(tmp_path.iterdir())


def test_a_profiler_that_cannot_start_or_write_is_one_warning(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        assert _run(tmp_path / "mine", "4:6") == 0
    finally:
        tf.profiler.experimental.stop()
    assert messages.messages == ["no trace is written: Another profiler is running."]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "plugins").touch()
    assert _run(tmp_path / "full", "4:6") == 0
    assert len(messages.messages) == 2 and "the trace cannot be written in" in messages.messages[1]
