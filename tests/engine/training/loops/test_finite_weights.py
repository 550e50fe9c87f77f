"""At which steps a training loop looks at its weights, and what it tells."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.training.loops.train_loop import FiniteWeightsCheck, pop_finite


class _Loop:
    """A loop that ends at the step of `global_step`; its model is one weight."""

    def __init__(self, steps_per_loop: int) -> None:
        self.global_step = tf.Variable(0, dtype=tf.int64)
        self.model = tf.Module()
        self.model.weight = tf.Variable(1.0)
        state = TrainState(self.global_step, self.model, None, None, None, seed=0)
        self._look = tf.function(
            FiniteWeightsCheck(
                state, self.global_step, TrainerConfig(steps_per_loop=steps_per_loop)
            ).result,
            autograph=False,
        )

    def seen_at(self, step: int, weight: float) -> bool | None:
        self.global_step.assign(step)
        self.model.weight.assign(weight)
        return pop_finite({"loss": 1.0, **self._look()})


@pytest.mark.parametrize("steps_per_loop", [5, 100])
def test_a_loop_of_five_steps_or_more_looks_at_its_end(steps_per_loop: int) -> None:
    loop = _Loop(steps_per_loop)
    assert [loop.seen_at(7, weight) for weight in (1.0, float("nan"), 2.0)] == [True, False, True]


@pytest.mark.parametrize("steps_per_loop", [1, 4])
def test_shorter_loops_look_at_every_fifth_step_only(steps_per_loop: int) -> None:
    loop = _Loop(steps_per_loop)

    assert [loop.seen_at(step, float("inf")) for step in range(4, 11)] == [
        None,
        False,
        None,
        None,
        None,
        None,
        False,
    ]
    assert loop.seen_at(15, 1.0) is True


def test_the_look_is_taken_out_of_the_results() -> None:
    results = {"loss": 1.0}

    assert pop_finite(results) is None
    assert results == {"loss": 1.0}

    state = TrainState(tf.Variable(5, dtype=tf.int64), tf.Module(), None, None, None, seed=0)
    results |= FiniteWeightsCheck(
        state, tf.Variable(5, dtype=tf.int64), TrainerConfig(steps_per_loop=5)
    ).result()

    assert len(results) == 2
    assert pop_finite(results) is True
    assert results == {"loss": 1.0}
