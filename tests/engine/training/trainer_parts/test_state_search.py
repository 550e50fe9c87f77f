"""When the state of a training step is looked for, and what checkpoints hold then."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.errors import UsageError
from trainer_kit.training.trainer_parts.state_search import StateSearch


class _Parts:
    """Variables where no other section of a checkpoint finds them."""

    def __init__(self) -> None:
        self.count, self.level = tf.Variable(0.0, name="count"), tf.Variable(1.0, name="level")


class _Task:
    """A step counts up by a level, which evaluations raise."""

    def __init__(self) -> None:
        self.parts = _Parts()

    def step(self) -> None:
        self.parts.count.assign_add(self.parts.level)

    def evaluate(self) -> None:
        self.parts.level.assign_add(1.0)

    def make(self) -> None:
        self.made = tf.Variable(0.0)


class _Run:
    """A task, the state of its run, and the search in it."""

    def __init__(self, *, required: bool = False, apart: str = "", **options: bool) -> None:
        self.task, step = _Task(), tf.Variable(0, dtype=tf.int64)
        self.state = TrainState(step, tf.Module(), tf.keras.optimizers.SGD(), None, self.task, seed=0)
        known: dict[str, Any] = {"trains": True, "own_loop": False, "own_train": False, **options}
        without = [getattr(self.task.parts, apart)] if apart else []
        self.search = StateSearch(self.state, lambda: without, required=required, **known)

    @property
    def held(self) -> set[str]:
        """The names of the variables that checkpoints hold in addition to all other sections."""
        return {name.rpartition("/")[2] for name in self.state.discovered.items}


def _graph(function: Any) -> tf.Graph:
    return tf.function(function, autograph=False).get_concrete_function().graph


def test_what_a_compiled_step_changes_is_held() -> None:
    run = _Run()
    run.search.look_into(_graph(run.task.step))
    assert run.search.is_done and run.held == {"count"}


def test_of_a_step_that_is_not_compiled_all_is_held() -> None:
    run = _Run()
    run.search.look_into(None)
    assert run.held == {"count", "level"}


def test_what_needs_no_saving_is_not_held() -> None:
    run = _Run(apart="count")
    run.search.look_into(None)
    assert run.held == {"level"}


def test_the_step_is_looked_into_once() -> None:
    run = _Run()
    run.search.look_into(_graph(run.task.step))
    run.search.look_into(None)
    assert run.held == {"count"}


@pytest.mark.parametrize(("compiled", "held"), [(True, {"count"}), (False, {"count", "level", "made"})])
def test_what_the_first_step_makes_is_held_if_it_is_not_compiled(compiled: bool, held: set[str]) -> None:
    run = _Run()
    run.search.look_into(_graph(run.task.step) if compiled else None)
    run.task.make()
    run.search.first_step_done()
    assert run.held == held


@pytest.mark.parametrize(("own_loop", "held"), [(True, {"count", "level"}), (False, set())])
def test_only_a_loop_of_its_own_is_searched_at_the_restore(own_loop: bool, held: set[str]) -> None:
    run = _Run(own_loop=own_loop)
    run.search.restored()
    assert (run.search.is_done, run.held) == (own_loop, held)


def test_a_run_that_does_not_train_is_not_searched() -> None:
    run = _Run(trains=False, own_loop=True, own_train=True)
    run.search.watch_variables()
    run.task.evaluate()
    run.search.restored()
    run.search.keep_what_changed()
    assert not run.search.is_done and run.held == set()


def test_what_an_action_changes_after_the_watch_began_is_held() -> None:
    run = _Run()
    run.search.watch_variables()
    run.search.look_into(_graph(run.task.step))
    run.search.keep_what_changed()
    assert run.held == {"count"}
    run.task.evaluate()
    run.search.keep_what_changed()
    assert run.held == {"count", "level"}


def test_a_train_of_its_own_has_what_it_makes_held_at_a_save() -> None:
    run = _Run(own_train=True)
    run.search.watch_variables()
    run.task.step()
    run.task.make()
    run.search.keep_what_changed()
    assert run.held == {"count", "made"}


def test_an_evaluation_is_reported_when_training_is_known(caplog: pytest.LogCaptureFixture) -> None:
    run = _Run()
    evaluation = _graph(run.task.evaluate)
    run.search.look_into_evaluation(evaluation)
    run.search.look_into(_graph(run.task.step))
    run.search.look_into_evaluation(None)  # of an evaluation that is not compiled
    assert not caplog.records
    run.search.look_into_evaluation(evaluation)
    (record,) = caplog.records
    assert "the evaluation changes the variable level" in record.getMessage()


def test_state_that_cannot_be_saved_is_an_error_if_required() -> None:
    lost = tf.Variable(0.0, name="lost")
    step = _graph(lambda: lost.assign_add(1.0))
    _Run().search.look_into(step)
    with pytest.raises(UsageError, match="require_exact_resume: the training step changes the variable lost"):
        _Run(required=True).search.look_into(step)


def test_a_save_from_another_thread_waits_for_an_evaluation() -> None:
    run = _Run()
    run.search.watch_variables()
    save = threading.Thread(target=run.search.keep_what_changed)
    with run.state.in_use:
        run.task.evaluate()
        save.start()
        save.join(0.2)
        assert save.is_alive()
        run.task.parts.level.assign(1.0)
    save.join()
    assert run.held == set()
