"""A controller of Orbit's own in a run: its actions, and how it stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.errors import StopTraining, UsageError
from trainer_kit.process.signals import StopSignals
from trainer_kit.run.orbit_adapters import Actions, OrbitController, list_actions
from trainer_kit.run.runner import run_experiment
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.loops.iterators import StopFlag


class _Counter(BaseTrainer):
    """Counts steps; its accuracy is that of the step."""

    def __init__(self) -> None:
        self.global_step = tf.Variable(0, dtype=tf.int64)
        self.stop_flag = StopFlag(tf.distribute.get_strategy())

    def train(self, num_steps: tf.Tensor) -> dict[str, Any]:
        self.global_step.assign_add(int(num_steps))
        return {"loss": tf.constant(1.0)}

    def evaluate(self, num_steps: tf.Tensor) -> dict[str, Any]:
        return {"accuracy": tf.cast(self.global_step, tf.float32)}


def _create_controller(
    folder: Path,
    *,
    trains: bool = True,
    train_actions: Sequence[Any] = (),
    eval_actions: Sequence[Any] = (),
) -> OrbitController:
    orbit = pytest.importorskip("orbit")
    counter = _Counter()
    trainer = SavedTrainer(
        tf.train.Checkpoint(global_step=counter.global_step), counter.global_step
    )
    manager = manager_of(trainer, folder, max_to_keep=99, interval=8, asynchronous=False)
    return OrbitController(
        orbit.Controller,
        trainer=counter if trains else None,
        evaluator=counter,
        global_step=counter.global_step,
        checkpoint_manager=manager,
        strategy=tf.distribute.get_strategy(),
        signals=StopSignals(),
        steps_per_loop=4,
        callbacks=CallbackList(Run(counter, str(folder))),
        actions=Actions(train_actions, eval_actions),
    )


def _list_saved_steps(folder: Path) -> list[int]:
    return list(complete_checkpoints(str(folder)))


def test_actions_are_called_with_the_logs(tmp_path: Path) -> None:
    logs: list[Any] = []
    controller = _create_controller(
        tmp_path, train_actions=[logs.append], eval_actions=[logs.append]
    )

    last_logs = controller.train_and_evaluate(train_steps=8, eval_interval=4)

    assert [list(names) for names in logs] == [["loss"], ["accuracy"]] * 2
    assert float(last_logs["accuracy"]) == 8.0
    assert controller.run.step == 8


def test_a_stop_that_the_trainer_was_asked_for_ends_the_run(tmp_path: Path) -> None:
    controller = _create_controller(
        tmp_path, train_actions=[lambda logs: controller.trainer.request_stop()]
    )

    controller.train_and_evaluate(20, evaluates=False)

    assert controller.should_stop
    assert _list_saved_steps(tmp_path)[-1] == 8


def test_an_evaluation_that_an_action_stops_saves_nothing(tmp_path: Path) -> None:
    def stop(logs: Any) -> None:
        raise StopTraining("enough")

    controller = _create_controller(tmp_path, trains=False, eval_actions=[stop])

    assert controller.evaluate() == {}
    assert controller.should_stop
    assert _list_saved_steps(tmp_path) == []


def test_the_checkpoints_of_a_run_are_evaluated_until_it_ends(tmp_path: Path) -> None:
    _create_controller(tmp_path).train_and_evaluate(8, evaluates=False)
    logs: list[Any] = []
    controller = _create_controller(tmp_path, trains=False, eval_actions=[logs.append])

    sidecar: Any = SimpleNamespace(is_finished=lambda: True)
    controller.evaluate_continuously(-1, 0.0, sidecar=sidecar)

    assert [float(evaluation["accuracy"]) for evaluation in logs] == [8.0]


@pytest.mark.parametrize("action", [keras.callbacks.EarlyStopping(), 5])
def test_what_cannot_be_called_is_no_action(action: Any) -> None:
    with pytest.raises(UsageError, match=r"train_actions: .* cannot be called"):
        list_actions("train_actions", [print, action])


def test_any_iterable_of_actions_is_called_after_each_loop(tmp_path: Path) -> None:
    calls: list[str] = []
    config = linear_experiment(train_steps=10)

    run_experiment(
        None,
        LinearTask(config.task),
        "train_and_eval",
        config,
        str(tmp_path / "run"),
        train_actions=(lambda logs, name=name: calls.append(name) for name in "ab"),
        eval_actions={"first": lambda logs: calls.append("eval")}.values(),
    )

    assert calls == ["a", "b", "a", "b", "eval"]


def test_checkpoints_by_a_time_with_a_controller_of_orbit(orbit: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    config = linear_experiment(train_steps=20, checkpoint_interval="10 min")

    run_experiment(
        None, LinearTask(config.task), "train", config, folder, controller_cls=orbit.Controller
    )

    assert list(complete_checkpoints(folder)) == [5, 20]  # the first is due since there is none yet


def test_callbacks_with_a_controller_of_orbits_are_refused(orbit: Any, tmp_path: Path) -> None:
    config = linear_experiment()

    with pytest.raises(
        UsageError, match=r"^Callback: Controller calls no callbacks of trainer_kit"
    ):
        run_experiment(
            None,
            LinearTask(config.task),
            "train",
            config,
            str(tmp_path / "run"),
            controller_cls=orbit.Controller,
            callbacks=[Callback()],
        )

    assert not (tmp_path / "run").exists()
