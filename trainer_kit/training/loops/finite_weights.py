"""FiniteWeights: checks inside a training loop whether all weights are finite, and adds the result to its results."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState

LOOK_EVERY = 5  # steps between checks when loops are shorter: a check in each loop would slow them down
_SOUND = "trainer_kit/sound"  # of the results of a loop
_NO_LOOK = -1


class FiniteWeights:
    """Checks the weights at the end of a training loop.

    Args:
      state: The TrainState of the run.
      global_step: The global step, an int64 scalar.
      options: The section trainer of the config; steps_per_loop is the number of steps of each loop.
    """

    def __init__(self, state: TrainState, global_step: tf.Variable, options: Any) -> None:
        self._state, self._global_step = state, global_step
        self._steps_per_loop: int = getattr(options, "steps_per_loop", 1)

    @tf.autograph.experimental.do_not_convert
    def result(self, in_parts: bool = False) -> dict[str, tf.Tensor]:
        """Returns an entry for the loop's results: 1 if all weights are finite, 0 if not, -1 if unchecked.

        Runs in graph.

        Args:
          in_parts: Whether there are results after each few steps of the loop.
        """
        if self._steps_per_loop >= LOOK_EVERY and not in_parts:
            return {_SOUND: self._look()}
        due = tf.equal(self._global_step % LOOK_EVERY, 0)
        return {_SOUND: tf.cond(due, self._look, lambda: tf.constant(_NO_LOOK))}

    def _look(self) -> tf.Tensor:
        return tf.cast(self._state.finite(), tf.int32)


def pop_finite(results: dict[str, Any]) -> bool | None:
    """Removes from the results of a loop whether the weights were finite, and returns it; None if it did not check."""
    seen = int(results.pop(_SOUND, _NO_LOOK))
    return None if seen == _NO_LOOK else seen == 1
