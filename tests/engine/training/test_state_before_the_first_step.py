"""A run that resumes and evaluates or saves before its first step has the state of that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.files import read_json_lines
from trainer_kit.run.runner import run_experiment


class _Counting(LinearTask):
    """Counts its steps in a variable of a closure, and reports the count in evaluations."""

    def build_model(self) -> Any:
        count = tf.Variable(0.0, trainable=False)

        def get_count() -> tf.Variable:
            return count

        self.counter = get_count
        return super().build_model()

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        self.counter().assign_add(1.0)
        return super().train_step(inputs, model, optimizer, metrics)

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        logs = super().validation_step(inputs, model, metrics)
        return {**logs, "count": self.counter().read_value()}


class _Failing(Callback):
    """Ends the first start before the evaluation of step 10; saves again after each evaluation."""

    name = "failing"

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def evaluation_begin(self, run: Run) -> None:
        if self._fails and run.step == 10:
            raise RuntimeError("the first start ends here")

    def evaluation_end(self, run: Run, logs: Any) -> None:
        run.save(overwrite=True)


class _Seen(Callback):
    """Counts loops in a variable that it creates at the end of the first one.

    Attributes:
      saved: The values of the variable in the checkpoints that are saved when it exists.
    """

    name = "seen"

    def __init__(self, counts: bool) -> None:
        self._counts = counts
        self.saved: list[int] = []

    def loop_end(self, run: Run, logs: Any) -> None:
        if not hasattr(run.task, "seen"):
            run.task.seen = tf.Variable(0)
        if self._counts:
            run.task.seen.assign_add(1)

    def checkpoint_saved(self, run: Run, path: str, step: int) -> None:
        if hasattr(run.task, "seen"):
            self.saved.append(int(run.task.seen))


def _run(folder: Path, *callbacks: Callback) -> Any:
    config = linear_experiment(
        train_steps=20,
        steps_per_loop=5,
        checkpoint_interval=5,
        summary_interval=5,
        validation_interval=10,
    )
    task = _Counting(config.task)
    run_experiment(None, task, "train_and_eval", config, str(folder), callbacks=callbacks)
    return task


def test_state_of_the_step_and_of_a_late_variable_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="the first start ends here"):
        _run(tmp_path, _Failing(True), _Seen(counts=True))

    seen = _Seen(counts=False)

    task = _run(tmp_path, _Failing(False), seen)

    # The evaluation of step 10 is before the first step of the second start, and so is a save.
    counts = [
        line["metrics"]["count"] for line in read_json_lines(tmp_path / "evals/validation.jsonl")
    ]
    assert counts == [10.0, 20.0]
    assert task.counter().numpy() == 20.0

    # The variable of the callback is created later, at step 15, and has the value of step 10.
    assert set(seen.saved) == {2}
    assert "task/seen, which this run does not have yet" in caplog.text
