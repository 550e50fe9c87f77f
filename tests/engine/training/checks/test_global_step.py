"""Trainers with a separate loop or step: the run follows global_step, and has to see it move."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.errors import DataError, PreemptedError, TrainerKitError, UsageError
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.telemetry.metrics_jsonl import read_active_history
from trainer_kit.testing import compare_runs
from trainer_kit.training.trainer import Trainer


class _OwnLoop(Trainer):
    def create_train_loop_fn(self) -> Any:
        orbit = pytest.importorskip("orbit")
        return orbit.utils.create_loop_fn(tf.function(self.train_step))


class _StoppingOwnLoop(_OwnLoop):
    """Asks for a stop at step 5."""

    def train_loop_end(self) -> dict[str, Any]:
        if int(self.global_step.numpy()) == 5:
            self.request_stop()
        return super().train_loop_end()


class _OwnTrain(Trainer):
    def train(self, num_steps: Any) -> dict[str, Any]:
        iterator = self.data.iterator()
        for _ in range(int(num_steps)):
            self.train_step(iterator)

        return self.train_loop_end()


class _NoCountInStep(Trainer):
    def train_step(self, iterator: Any) -> None:
        arguments = (next(iterator), self.model, self.optimizer, self.train_metrics)
        self.strategy.run(self.task.train_step, args=arguments)


class _NoCountInTrain(Trainer):
    def train(self, num_steps: Any) -> dict[str, Any]:
        for _ in range(int(num_steps)):
            next(self.data.iterator())
        return {"training_loss": tf.constant(1.0)}


class _CountsBack(Trainer):
    def train_loop_end(self) -> dict[str, Any]:
        self.global_step.assign_sub(7)
        return super().train_loop_end()


class _CountsTwice(Trainer):
    def train_step(self, iterator: Any) -> None:
        super().train_step(iterator)
        self.global_step.assign_add(1)


class _EndingTask(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return super().build_inputs(params, input_context).at(0).take(13)


def _run(
    kind: type[Trainer],
    folder: Path,
    mode: str = "train",
    task: type = LinearTask,
    **arguments: Any,
) -> Trainer:
    config = linear_experiment()
    task_object = task(config.task)
    seed_everything(1)  # before the model is made: a run seeds itself only after that
    trainer = kind.create(config, task_object, train=True, evaluate=True)
    run_experiment(None, task_object, mode, config, str(folder), trainer=trainer, **arguments)
    return trainer


def _list_steps(folder: Path) -> list[int]:
    return [
        line["step"]
        for line in read_active_history(str(folder / "metrics.jsonl"))
        if line["kind"] == "train"
    ]


@pytest.mark.parametrize("kind", [_OwnLoop, _OwnTrain])
def test_a_loop_of_a_subclass_reports_saves_and_resumes(
    kind: type[Trainer], tmp_path: Path
) -> None:
    """User code stops the one, and a signal the other."""
    _run(kind, tmp_path / "whole")

    assert _list_steps(tmp_path / "whole") == [5, 10, 15, 20]
    assert list(complete_checkpoints(str(tmp_path / "whole"))) == [10, 20]

    with pytest.raises(
        PreemptedError, match=r"stopped by (trainer\.request_stop\(\)|SIGTERM) at step"
    ):
        if kind is _OwnLoop:
            _run(_StoppingOwnLoop, tmp_path / "stopped")
        else:
            _run(kind, tmp_path / "stopped", train_actions=[_send_signal])

    _run(kind, tmp_path / "stopped")
    differences = compare_runs(str(tmp_path / "whole"), str(tmp_path / "stopped"))

    differing = [line for line in differences if "differ" in line]
    assert not [line for line in differing if "_OBJECT_GRAPH" not in line], differences


def _send_signal(logs: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("kind", "method", "mode"),
    [
        (_NoCountInStep, "_NoCountInStep.train_step", "train"),
        (_NoCountInTrain, "_NoCountInTrain.train", "train_and_eval"),
    ],
)
def test_a_loop_that_does_not_count_is_an_error(
    kind: type[Trainer], method: str, mode: str, tmp_path: Path
) -> None:
    with pytest.raises(
        TrainerKitError, match=rf"{method} \(test_global_step.py:\d+\) did not add to global_step"
    ):
        _run(kind, tmp_path, mode)

    assert not complete_checkpoints(str(tmp_path))
    assert not (tmp_path / "final.json").exists()


def test_a_loop_that_counts_back_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        TrainerKitError, match="global_step: it is 0 before and -2 after a training loop"
    ):
        _run(_CountsBack, tmp_path)


def test_orbits_controller_ends_uncounted_or_stopped_runs(orbit: Any, tmp_path: Path) -> None:
    with pytest.raises(
        TrainerKitError, match=r"_NoCountInStep.train_step .* did not add to global_step"
    ):
        _run(_NoCountInStep, tmp_path / "uncounted", controller_cls=orbit.Controller)

    with pytest.raises(DataError, match="ended at step 13"):
        _run(Trainer, tmp_path / "ended", task=_EndingTask, controller_cls=orbit.Controller)

    with pytest.raises(PreemptedError, match="stopped by SIGTERM at step") as stopped:
        _run(
            Trainer,
            tmp_path / "stopped",
            controller_cls=orbit.Controller,
            train_actions=[_send_signal],
        )

    assert f"at step {max(complete_checkpoints(str(tmp_path / 'stopped')))};" in str(stopped.value)


def test_a_loop_that_counts_more_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        trainer = _run(_CountsTwice, tmp_path)

    assert _list_steps(tmp_path) == [10, 20]
    assert int(trainer.optimizer.iterations.numpy()) == 10
    assert caplog.text.count("moved global_step by 10") == 1
    assert "_CountsTwice.train_step" in caplog.text


@pytest.mark.parametrize("kind", [_OwnLoop, _OwnTrain])
def test_data_may_end_inside_a_loop_of_a_subclass(kind: type[Trainer], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ended at step 13 of 20"):
        _run(kind, tmp_path, task=_EndingTask)

    assert list(complete_checkpoints(str(tmp_path)))[-1] == 13


def test_a_trainer_of_orbit_is_refused_with_a_way_out(orbit: Any, tmp_path: Path) -> None:
    class Plain(orbit.AbstractTrainer):
        def train(self, num_steps: Any) -> None: ...

    config = linear_experiment()

    with pytest.raises(
        UsageError, match=r"Plain is not a trainer_kit\.Trainer; inherit from trainer_kit\.Trainer"
    ):
        run_experiment(
            None, LinearTask(config.task), "train", config, str(tmp_path), trainer=Plain()
        )  # type: ignore[arg-type]
