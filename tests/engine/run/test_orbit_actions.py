"""Actions of Orbit as a callback."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.callback import Evaluation, Loop, Run
from trainer_kit.run.orbit_adapters import Actions, register_states
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.trainer_creation import create_trainer


def _run(step: int = 10) -> Run:
    run = Run(SimpleNamespace(global_step=tf.Variable(step, dtype=tf.int64)))
    run.loop = Loop(5, 10, 1.0, {})
    run.evaluation = Evaluation(10)
    return run


class _Patience:
    """A callback that counts; what it has counted survives."""

    def __init__(self) -> None:
        self.waited = 0

    def __call__(self, logs: Any) -> None:
        self.waited += 1

    def state(self) -> int:
        return self.waited

    def restore(self, state: int) -> None:
        self.waited = state


def test_states_of_actions_are_saved_and_restored() -> None:
    config = tiny_experiment()
    first = _Patience()
    second = _Patience()
    text = b""

    for action in (first, second):
        trainer = create_trainer(config, TinyTask(config.task))
        register_states(trainer, [action, print])
        if action is first:
            first({})
            trainer.state.python_state.store()
            text = trainer.state.python_state.variable.numpy()
        else:
            trainer.state.python_state.variable.assign(text)
            no_arrays: Any = None
            trainer.state.python_state.load(no_arrays)

    assert second.waited == 1


def test_an_eval_action_that_sets_global_step_back_does_so_too() -> None:
    run = _run()

    Actions([], [lambda _: run.trainer.global_step.assign(5)]).evaluation_end(run, {})

    assert run.requests.rewind_step == 5
    assert run.step == 5


def test_actions_after_evaluations_see_no_replayed_one() -> None:
    run = _run()
    calls = []
    actions = Actions([], [calls.append])
    actions.evaluation_end(run, {"a": 1})
    run.evaluation = Evaluation(10, is_replayed=True)

    actions.evaluation_end(run, {"a": 2})

    assert calls == [{"a": 1}]
