"""When the state of a training step is added to checkpoints."""

from __future__ import annotations

import threading
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.errors import UsageError
from trainer_kit.training.tracked_state import TrackedState


class _Layers(keras.layers.Layer):  # type: ignore[misc]
    """Weights where no other section of a checkpoint finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(name="count")
        self.level = self.add_weight(name="level", initializer="ones")


class _Task:
    """A step counts up by a level, which evaluations raise, in an attribute and in a closure."""

    def __init__(self) -> None:
        self.layers = _Layers()
        hidden = tf.Variable(0.0, name="hidden")
        self.count = lambda: hidden.assign_add(1.0)

    def step(self) -> None:
        self.layers.count.assign_add(self.layers.level)
        self.count()

    def evaluate(self) -> None:
        self.layers.level.assign_add(1.0)

    def make(self) -> None:
        self.made = tf.Variable(0.0)


class _Run:
    """A task, the state of its run, and what keeps it in checkpoints."""

    def __init__(self, *, required: bool = False, exclude: str = "", **options: bool) -> None:
        self.task, step = _Task(), tf.Variable(0, dtype=tf.int64)
        self.state = TrainState(step, tf.Module(), keras.optimizers.SGD(), None, self.task, seed=0)
        trainer: dict[str, Any] = {"trains": True, "own_loop": False, "own_train": False, **options}
        without = [getattr(self.task.layers, exclude)] if exclude else []
        self.tracked = TrackedState(self.state, lambda: without, required=required, **trainer)

    @property
    def names(self) -> set[str]:
        """The names of the variables that checkpoints contain in addition to all other sections."""
        return {name.partition("/")[2] for name in self.state.step_state.variables}


ATTRIBUTES = {"layers/count", "layers/level"}
HIDDEN = "0 float32 []"


def _graph(function: Any) -> tf.Graph:
    return tf.function(function, autograph=False).get_concrete_function().graph


def test_attributes_and_what_a_compiled_step_changes_are_kept() -> None:
    run = _Run()
    run.tracked.keep_written(_graph(run.task.step))
    assert run.tracked.is_done and run.names == {*ATTRIBUTES, HIDDEN}


def test_of_a_step_that_is_not_compiled_attributes_are_kept() -> None:
    run = _Run()
    run.tracked.keep_written(None)
    assert run.names == ATTRIBUTES


def test_what_needs_no_saving_is_not_kept() -> None:
    run = _Run(exclude="count")
    run.tracked.keep_written(_graph(run.task.step))
    assert run.names == {"layers/level", HIDDEN}


def test_the_step_is_looked_into_once() -> None:
    run = _Run()
    run.tracked.keep_written(None)
    run.tracked.keep_written(_graph(run.task.step))
    assert run.names == ATTRIBUTES


def test_what_the_first_step_makes_is_kept_at_the_save() -> None:
    run = _Run()
    run.tracked.keep_written(_graph(run.task.step))
    run.task.make()
    run.tracked.before_save()
    assert run.names == {*ATTRIBUTES, HIDDEN, "made"}


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_restore_keeps_attributes_and_ends_for_an_own_loop(own_loop: bool) -> None:
    run = _Run(own_loop=own_loop)
    run.tracked.after_restore()
    assert (run.tracked.is_done, run.names) == (own_loop, ATTRIBUTES)


def test_a_run_that_does_not_train_keeps_nothing() -> None:
    run = _Run(trains=False, own_loop=True, own_train=True)
    run.tracked.after_restore()
    run.tracked.before_save()
    assert not run.tracked.is_done and run.names == set()


def test_a_train_of_its_own_has_what_it_makes_kept_at_a_save() -> None:
    run = _Run(own_train=True)
    run.tracked.after_restore()
    run.task.make()
    run.tracked.before_save()
    assert run.names == {*ATTRIBUTES, "made"}


def test_an_evaluation_is_reported_when_training_is_known(caplog: pytest.LogCaptureFixture) -> None:
    run = _Run()
    evaluation = _graph(run.task.evaluate)
    run.tracked.check_evaluation(evaluation)
    run.tracked.keep_written(_graph(run.task.step))
    run.tracked.check_evaluation(None)  # of an evaluation that is not compiled
    assert not caplog.records
    run.tracked.check_evaluation(evaluation)
    (record,) = caplog.records
    assert "/level" in record.getMessage() and "which training uses" in record.getMessage()


def test_state_that_cannot_be_saved_is_an_error_if_required() -> None:
    queue = tf.queue.FIFOQueue(10, tf.float32)

    def enqueue() -> None:
        queue.enqueue(1.0)

    step = _graph(enqueue)
    _Run().tracked.keep_written(step)
    with pytest.raises(UsageError, match="require_exact_resume: the training step changes a queue"):
        _Run(required=True).tracked.keep_written(step)


def test_a_save_from_another_thread_waits_for_an_evaluation() -> None:
    run = _Run()
    save = threading.Thread(target=run.tracked.before_save)
    with run.state.in_use:
        save.start()
        save.join(0.2)
        assert save.is_alive()
    save.join()
    assert run.names == ATTRIBUTES
