"""A controller of Orbit's own in a run: what callbacks and actions see of it, and how it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orbit
import pytest
import tensorflow as tf

from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.orbit_actions import Actions
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.errors import StopTraining, UsageError
from trainer_kit.run.orbit_controller import OrbitController
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.trainer_parts.stop_flag import StopFlag


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


class _Seen(Callback):
    """Notes what happens, and does `then` after a loop or an evaluation of a step."""

    def __init__(self, then: Callable[[Run], None] = lambda run: None, at: int = -1) -> None:
        self.events: list[Any] = []
        self._then, self._at = then, at

    def train_begin(self, run: Run) -> None:
        self.events.append("begin")

    def loop_end(self, run: Run, logs: Any) -> None:
        assert run.loop is not None
        self.events.append((run.loop.begin, run.loop.end))
        self._act(run)

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        assert run.evaluation is not None
        self.events.append((run.evaluation.step, float(logs["accuracy"])))
        self._act(run)

    def train_end(self, run: Run) -> None:
        self.events.append("end")

    def _act(self, run: Run) -> None:
        if run.step == self._at:
            self._then(run)


def _controller(
    folder: Path,
    *members: Callback,
    trains: bool = True,
    stopping: Callable[[], bool] = lambda: False,
    train_actions: Sequence[Any] = (),
    eval_actions: Sequence[Any] = (),
) -> OrbitController:
    counter = _Counter()
    manager = CheckpointManager(
        tf.train.Checkpoint(global_step=counter.global_step), str(folder), max_to_keep=99,
        step_counter=counter.global_step, checkpoint_interval=8, asynchronous=False,
    )  # fmt: skip
    return OrbitController(
        orbit.Controller, trainer=counter if trains else None, evaluator=counter, global_step=counter.global_step,
        checkpoint_manager=manager, strategy=tf.distribute.get_strategy(), stopping=stopping, steps_per_loop=4,
        callbacks=CallbackList(Run(counter, str(folder)), members), actions=Actions(train_actions, eval_actions),
    )  # fmt: skip


def _saved(folder: Path) -> list[int]:
    return list(complete_checkpoints(str(folder)))


def test_callbacks_see_training_loops_and_evaluations(tmp_path: Path) -> None:
    seen = _Seen()
    logs = _controller(tmp_path, seen).train_and_evaluate(8, eval_interval=4)
    assert seen.events == ["begin", (0, 4), (4, 4.0), (4, 8), (8, 8.0), "end"]
    assert float(logs["accuracy"]) == 8.0


class _Reports(Callback):
    """Reports after each loop under a name that evaluations have too."""

    def loop_end(self, run: Run, logs: Any) -> None:
        run.report("accuracy", 0.25)


def test_values_reported_by_callbacks_are_in_the_logs(tmp_path: Path) -> None:
    controller = _controller(tmp_path, _Reports())
    assert float(controller.train_and_evaluate(8, eval_interval=4)["accuracy"]) == 8.0
    assert controller.run.loop is not None and controller.run.loop.logs["accuracy"] == 0.25


def test_a_loop_of_a_resumed_run_begins_where_the_run_does(tmp_path: Path) -> None:
    _controller(tmp_path).train(8)
    seen = _Seen()
    controller = _controller(tmp_path, seen)
    for end in (12, 14):
        controller.train(end)
    assert seen.events == ["begin", (8, 12), "end", "begin", (12, 14), "end"]


def test_actions_are_called_with_the_logs(tmp_path: Path) -> None:
    logs: list[Any] = []
    controller = _controller(tmp_path, train_actions=[logs.append], eval_actions=[logs.append])
    controller.train_and_evaluate(4)
    assert [list(one) for one in logs] == [["loss"], ["accuracy"]]


def test_a_callback_stops_the_run_saved_and_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = _Seen(lambda run: run.stop("enough"), at=12)
    controller = _controller(tmp_path, seen)
    assert controller.train_and_evaluate(20, eval_interval=20) == {}
    assert seen.events == ["begin", (0, 4), (4, 8), (8, 12), "end"] and _saved(tmp_path)[-1] == 12
    assert (controller.stopping, controller.run.stop_reason) == (True, "enough")
    assert "Controller does not evaluate at the end of a run that an action has stopped" in caplog.text


def test_an_action_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    def stop(logs: Any) -> None:
        raise StopTraining("enough")

    controller = _controller(tmp_path, train_actions=[stop])
    controller.train(20)
    assert (_saved(tmp_path), controller.stopping, controller.run.stop_reason) == ([4], True, "enough")


def test_a_stop_from_outside_is_saved_and_has_no_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    controller = _controller(tmp_path, stopping=lambda: True)
    controller.train(20)
    assert (_saved(tmp_path), controller.stopping, controller.run.stop_reason) == ([4], True, "")
    assert not caplog.records


def test_a_stop_that_the_trainer_was_asked_for_ends_the_run(tmp_path: Path) -> None:
    seen = _Seen(lambda run: run.trainer.request_stop(), at=4)
    controller = _controller(tmp_path, seen)
    controller.train(20)
    assert controller.stopping and _saved(tmp_path)[-1] == 8  # one loop later


@pytest.mark.parametrize("ask", [Run.save, Run.evaluate, lambda run: run.rewind(0, "why not")])
def test_other_requests_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ask: Callable[[Run], None]
) -> None:
    seen = _Seen(ask, at=8)
    _controller(tmp_path, seen).train(12)
    assert seen.events == ["begin", (0, 4), (4, 8), (8, 12), "end"] and _saved(tmp_path) == [4, 12]
    assert [one.getMessage() for one in caplog.records] == [
        "Controller ignores the requests of callbacks to save, evaluate or rewind; it can only stop"
    ]


def test_a_callback_that_cuts_loops_is_refused_by_name(tmp_path: Path) -> None:
    class Cutting(Callback):
        every = 3

    with pytest.raises(UsageError, match=r"cannot end training loops at the steps that Cutting asks for"):
        _controller(tmp_path, _Seen(), Cutting())


def test_an_evaluation_that_a_callback_stops_saves_nothing(tmp_path: Path) -> None:
    controller = _controller(tmp_path, _Seen(lambda run: run.stop("enough"), at=0), trains=False)
    assert controller.evaluate() == {}
    assert controller.stopping and _saved(tmp_path) == []


def test_the_checkpoints_of_a_run_are_evaluated_until_it_ends(tmp_path: Path) -> None:
    _controller(tmp_path).train(8)
    seen = _Seen()
    controller = _controller(tmp_path, seen, trains=False)
    controller.evaluate_continuously(-1, 0.0, lambda: True)
    assert seen.events == [(8, 8.0)]


def test_a_checkpoint_is_restored_by_its_path(tmp_path: Path) -> None:
    controller, path = _controller(tmp_path), str(tmp_path / "ckpt-4")
    controller.train(12)
    assert controller.restore_checkpoint(path) == path and controller.run.step == 4
