"""When the state of a training step is added to checkpoints."""

from __future__ import annotations

import threading
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.errors import UsageError


class _Layers(keras.layers.Layer):  # type: ignore[misc]
    """Weights where no other section of a checkpoint finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(name="count")
        self.level = self.add_weight(name="level", initializer="ones")


class _Task:
    """A step counts up by a level, in an attribute and in a closure."""

    def __init__(self) -> None:
        self.layers = _Layers()
        hidden = tf.Variable(0.0, name="hidden")

        def count() -> None:
            hidden.assign_add(1.0)

        self.count = count

    def step(self) -> None:
        self.layers.count.assign_add(self.layers.level)
        self.count()

    def make(self) -> None:
        self.made = tf.Variable(0.0)


class _Run:
    """A task, the state of its run, and what checkpoints do not need."""

    def __init__(self, *, required: bool = False, exclude: str = "") -> None:
        self.task = _Task()
        step = tf.Variable(0, dtype=tf.int64)
        optimizer = keras.optimizers.SGD()
        self.state = TrainState(
            step, tf.Module(), optimizer, None, self.task, seed=0, require_exact=required
        )
        self.without = [getattr(self.task.layers, exclude)] if exclude else []

    @property
    def names(self) -> set[str]:
        """The names of the variables that checkpoints contain in addition to all other sections."""
        return {name.partition("/")[2] for name in self.state.step_state.variables}


ATTRIBUTES = {"layers/count", "layers/level"}
HIDDEN = "0 float32 []"


def _trace_graph(function: Any) -> tf.Graph:
    return tf.function(function, autograph=False).get_concrete_function().graph


def test_attributes_and_what_a_compiled_step_changes_are_kept() -> None:
    run = _Run()

    run.state.track_step_state(_trace_graph(run.task.step), [])

    assert run.state.is_step_tracked
    assert run.names == {*ATTRIBUTES, HIDDEN}


def test_of_a_step_that_is_not_compiled_attributes_are_kept() -> None:
    run = _Run()

    run.state.track_step_state(None, [])

    assert run.state.is_step_tracked
    assert run.names == ATTRIBUTES


def test_what_needs_no_saving_is_not_kept() -> None:
    run = _Run(exclude="count")

    run.state.track_step_state(_trace_graph(run.task.step), run.without)

    assert run.names == {"layers/level", HIDDEN}


def test_what_the_first_step_makes_is_kept_at_the_save() -> None:
    run = _Run()

    run.state.track_step_state(_trace_graph(run.task.step), [])
    run.task.make()
    run.state.track_attributes([])

    assert run.names == {*ATTRIBUTES, HIDDEN, "made"}


def test_state_that_cannot_be_saved_is_an_error_if_required() -> None:
    queue = tf.queue.FIFOQueue(10, tf.float32)

    def enqueue() -> None:
        queue.enqueue(1.0)

    step = _trace_graph(enqueue)
    _Run().state.track_step_state(step, [])

    with pytest.raises(UsageError, match="require_exact_resume: the training step changes a queue"):
        _Run(required=True).state.track_step_state(step, [])


def test_a_save_from_another_thread_waits_for_an_evaluation() -> None:
    run = _Run()
    save = threading.Thread(target=run.state.track_attributes, args=([],))
    with run.state.variables_lock:
        save.start()
        save.join(0.2)
        assert save.is_alive()

    save.join()

    assert run.names == ATTRIBUTES
