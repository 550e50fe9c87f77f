"""FiniteWeights: whether all weights are finite, found out inside a training loop, with its results."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState

LOOK_EVERY = 5  # steps between looks where loops are shorter: there each look would cost
_SOUND = "trainer_kit/sound"  # of the results of a loop
_NO_LOOK = -1


class FiniteWeights:
    """Looks at the weights at the end of a training loop.

    Args:
      state: of the run.
      global_step: int64 scalar.
      steps_per_loop: of the run; an integer.
    """

    def __init__(self, state: TrainState, global_step: tf.Variable, steps_per_loop: int) -> None:
        self._state, self._global_step, self._steps_per_loop = state, global_step, steps_per_loop

    @tf.autograph.experimental.do_not_convert
    def result(self) -> dict[str, tf.Tensor]:
        """Returns what a loop adds to its results: 1 if all weights are finite, 0 if not, -1 if not seen; in graph."""
        if self._steps_per_loop >= LOOK_EVERY:
            return {_SOUND: self._look()}
        due = tf.equal(self._global_step % LOOK_EVERY, 0)
        return {_SOUND: tf.cond(due, self._look, lambda: tf.constant(_NO_LOOK))}

    def _look(self) -> tf.Tensor:
        return tf.cast(self._state.finite(), tf.int32)


def pop_finite(results: dict[str, Any]) -> bool | None:
    """Takes the look out of the results of a loop and returns it; None where there was none. Eager, on the host."""
    seen = int(results.pop(_SOUND, _NO_LOOK))
    return None if seen == _NO_LOOK else seen == 1
