"""GradientNorms: the global gradient norm of each update, and the norms that are spikes; all inside the training loop.

A norm is compared with a quantile of the norms of the updates before it, which a variable holds. The first norm that
is compared has `warmup` norms before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.config.schema.gradient_processors import GradientSpikeAlarmConfig
from trainer_kit.optimizers.gradients import Gradient

_EMPTY = -1.0  # below every norm


class GradientNorms:
    """Records the norms of one optimizer, its attribute `gradient_norms`. Created in the scope of the strategy.

    Args:
      global_step: The global step, an int64 scalar variable.
      alarm: The section that says which norms are spikes; with None no norm is one.

    Attributes:
      is_used: Whether a step has been traced that records norms.
    """

    def __init__(self, global_step: Any, alarm: GradientSpikeAlarmConfig | None = None) -> None:
        self._global_step, self._alarm, self.is_used = global_step, alarm, False
        self._sum = _variable(np.zeros(2, np.float32))  # of norms, and their number
        if alarm is not None:
            self._spikes = _variable(np.zeros(3, np.float32))  # their number, the largest norm, and its quantile
            self._step = _variable(np.int64(0))  # of the largest norm
            self._window = _variable(np.full(alarm.window, _EMPTY, np.float32))
            self._seen = _variable(np.int64(0))  # finite norms so far

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that belong to a loop, and are reset when one begins."""
        return [self._sum] if self._alarm is None else [self._sum, self._spikes, self._step]

    @property
    def persistent_variables(self) -> list[tf.Variable]:
        """The variables of the alarm that a checkpoint has to hold."""
        return [] if self._alarm is None else [self._window, self._seen]

    @tf.autograph.experimental.do_not_convert
    def update(self, gradients: Sequence[Gradient]) -> None:
        """Records the norm of the gradients of an update, summed over replicas and unscaled; in a replica."""
        self.is_used = True
        values = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
        norm = tf.linalg.global_norm([tf.cast(one, tf.float32) for one in values])
        self._sum.assign_add(tf.stack([norm, 1.0]))
        if self._alarm is not None:
            self._compare(norm, self._alarm)

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Begins a loop; runs eagerly or in graph, in cross-replica context."""
        for one in self.variables:
            one.assign(tf.zeros_like(one))

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, tf.Tensor]:
        """Returns scalars of this loop, in cross-replica context: the mean norm, the number of updates, and of spikes.

        With an alarm also the largest spike: its step, its norm, and the quantile that it was compared with.
        """
        total, updates = tf.unstack(tf.convert_to_tensor(self._sum))
        found = {"norm": total / updates, "updates": updates}
        if self._alarm is not None:
            spikes = tf.unstack(tf.convert_to_tensor(self._spikes))
            found |= dict(zip(("spikes", "largest", "quantile"), spikes, strict=True))
            found["step"] = tf.cast(tf.convert_to_tensor(self._step), tf.float64)
        return found

    def state(self) -> dict[str, Any]:
        """Returns the state of the alarm, for a checkpoint; runs eagerly. It is the same on all replicas."""
        local = tf.distribute.get_strategy().experimental_local_results
        window, seen = (local(one)[0].numpy() for one in self.persistent_variables)
        return {"window": window, "seen": int(seen)}

    def restore(self, state: Mapping[str, Any] | None) -> bool:
        """Restores what `state` returned, or empties the window without it; runs eagerly.

        Returns:
          Whether the state, if any, is of a window as long as this one.
        """
        empty = np.full(self._window.shape, _EMPTY, np.float32)
        fits = state is None or state["window"].shape == empty.shape
        known = state if state is not None and fits else {"window": empty, "seen": 0}
        for variable, name in zip(self.persistent_variables, ("window", "seen"), strict=True):
            for local in tf.distribute.get_strategy().experimental_local_results(variable):
                local.assign(known[name])
        return fits

    def _compare(self, norm: tf.Tensor, alarm: GradientSpikeAlarmConfig) -> None:
        window, seen = tf.convert_to_tensor(self._window), tf.convert_to_tensor(self._seen)
        quantile = quantile_of(window, tf.minimum(seen, alarm.window), alarm.quantile)
        # Not "norm > ...": a norm that is not a number is a spike.
        is_spike = (seen >= alarm.warmup) & ~(norm <= alarm.factor * quantile)
        size = tf.where(tf.math.is_finite(norm), norm, float("inf"))
        before = tf.convert_to_tensor(self._spikes)
        count, largest, _ = tf.unstack(before)
        is_largest = is_spike & ((count < 1) | (size > largest))
        record = tf.where(is_largest, tf.stack([count + 1, size, quantile]), before + tf.stack([1.0, 0.0, 0.0]))
        self._spikes.assign(tf.where(is_spike, record, before))
        step = tf.convert_to_tensor(self._step)
        self._step.assign(tf.where(is_largest, tf.convert_to_tensor(self._global_step) + 1, step))
        is_finite = tf.math.is_finite(norm)
        kept = tf.tensor_scatter_nd_update(window, [[seen % alarm.window]], [norm])
        self._window.assign(tf.where(is_finite, kept, window))
        self._seen.assign(seen + tf.cast(is_finite, tf.int64))


@tf.autograph.experimental.do_not_convert
def quantile_of(window: tf.Tensor, count: tf.Tensor, quantile: float) -> tf.Tensor:
    """Returns the quantile of `count` values, a float32 scalar; runs eagerly or in graph.

    It is one of the values, without interpolation: that of numpy.quantile with method="higher".

    Args:
      window: The values, float32 [n], and -1 in places without a value.
      count: The number of values, an int64 scalar; for 0 the result is one of the -1.
      quantile: The quantile, above 0 and at most 1.
    """
    share, rounding = 1.0 - quantile, 1e-9  # (1 - 0.9) * 10 is a little below 1
    largest = tf.math.top_k(window, int(share * (window.shape[0] - 1) + rounding) + 1).values
    before = tf.maximum(tf.cast(count, tf.float64) - 1.0, 0.0)
    return largest[tf.cast(share * before + rounding, tf.int32)]


def _variable(initial: Any) -> tf.Variable:
    """Returns a variable that each replica writes for itself, and always with the same value."""
    return tf.Variable(
        initial,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        name="gradient_norms",
    )
