"""The learning-rate range test: trains while the rate rises exponentially, and suggests a rate.

Source: Smith, Cyclical Learning Rates for Training Neural Networks, section 3.3,
https://arxiv.org/abs/1506.01186. There the rate rises linearly, and a person reads the curve.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import DataError, DivergedError, UsageError
from trainer_kit.optimizers.learning_rate import current_learning_rate
from trainer_kit.telemetry.scalars import get_training_loss

if TYPE_CHECKING:
    from trainer_kit.training.trainer import Trainer

# The number of steps that show a curve.
_FEWEST = 20
# A mean loss of this many times the lowest mean loss is a divergence.
_FACTOR = 4
# Why a test ended before the highest rate.
DIVERGED = "training diverged"
DATA_ENDED = "the training data ended"


@dataclass(frozen=True)
class RateRange:
    """The measurements of a range test.

    Attributes:
      rates: The learning rate of each step, in increasing order, float64 [steps].
      losses: The training loss of each step, before its update, float64 [steps].
      ended_by: Why the test ended before the highest rate: "training diverged" or "the training
        data ended". "" if it did not.
    """

    rates: np.ndarray
    losses: np.ndarray
    ended_by: str = ""

    @property
    def smoothed_losses(self) -> np.ndarray:
        """The mean loss of the steps around each step, which are a twentieth of all steps or 5."""
        count = len(self.losses)
        cumulative = np.cumsum(self.losses)
        sums = np.concatenate([[0.0], cumulative])
        places = np.arange(count)
        reach = _window(count) // 2
        # The window is smaller at both ends of the curve.
        begins = np.maximum(places - reach, 0)
        ends = np.minimum(places + reach + 1, count)
        window_sums = sums[ends] - sums[begins]
        return window_sums / (ends - begins)

    @property
    def lowest_loss_rate(self) -> float:
        """The rate at which the smoothed loss is lowest."""
        lowest = np.argmin(self.smoothed_losses)
        return float(self.rates[lowest])

    @property
    def is_still_falling(self) -> bool:
        """Whether the loss is lowest at the highest rate, so that a higher rate may be better."""
        count = len(self.losses)
        last = count - 1 - _window(count) // 2
        lowest = int(np.argmin(self.smoothed_losses))
        return self.is_falling and self.ended_by != DIVERGED and lowest >= last

    @property
    def is_falling(self) -> bool:
        """Whether the smoothed loss falls by more than the noise.

        It does if the lowest smoothed loss is below the first one by more than five standard errors
        of such a mean.
        """
        smoothed = self.smoothed_losses
        window = _window(len(self.losses))
        lowest = int(np.argmin(smoothed))

        # The first mean is that of half a window.
        deviations = self.losses - smoothed
        num_deviations = max(lowest, window) + 1
        deviation = np.std(deviations[:num_deviations])
        noise = deviation / math.sqrt(window // 2 + 1)
        fall = smoothed[0] - smoothed[lowest]
        return bool(fall > 5 * noise)

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate at which the smoothed loss is lowest.

        At the lowest loss it is about to rise. None if the loss does not fall, or still falls at
        the highest rate.

        This is the rule of fastai, https://arxiv.org/abs/2002.04688. Another rule takes the rate
        where the loss falls fastest. That was 250 times too low for a transformer, whose loss falls
        at all rates.
        """
        if not self.is_falling or self.is_still_falling:
            return None
        return self.lowest_loss_rate / 10


def range_test_config(
    config: ExperimentConfig, lowest: float, highest: float, steps: int
) -> ExperimentConfig:
    """Returns `config` with a learning rate that rises from `lowest` to `highest`.

    The rate rises in `steps` steps by equal factors.

    Raises:
      UsageError: when there are too few steps for a curve, or the config has several optimizers.
    """
    if steps < _FEWEST:
        raise UsageError(f"--steps: {steps} is too few for a curve; give at least {_FEWEST}")
    _refuse_several(config.trainer.optimizers)

    # The config may have its own exponential schedule, so each of its fields is set.
    schedule = {
        "initial_learning_rate": lowest,
        "decay_steps": steps - 1,
        "decay_rate": highest / lowest,
        "staircase": False,
        "offset": 0,
    }
    rate = {
        "learning_rate": {"type": "exponential", "exponential": schedule},
        "warmup": {"type": None},
    }
    return config.replace(trainer={"optimizer_config": rate, "fuse_steps": 1})


def run_range_test(trainer: Trainer, lowest: float, steps: int) -> RateRange:
    """Trains for up to `steps` steps and returns the measured curve.

    Runs eagerly, on the host, in strategy scope. It stops when the loss is not finite, or its mean
    over some steps is four times its lowest mean.

    Args:
      trainer: A new trainer, created with a config from range_test_config.
      lowest: The rate of the first step.
      steps: The number of steps.

    Raises:
      UsageError: when the optimizer does not have the rate of the config.
      DataError: when the training data ends after fewer than 20 steps.
      DivergedError: when training diverges in fewer than 20 steps.
    """
    trainer.initialize()

    # The rate before the first step has to be that of the config.
    optimizer = trainer.optimizer
    _refuse_several(optimizer if isinstance(optimizer, Mapping) else ())
    rate = float(current_learning_rate(optimizer))
    if not math.isclose(rate, lowest, rel_tol=1e-3):
        raise UsageError(
            f"{type(trainer.task).__name__}.create_optimizer returns an optimizer with the "
            f"learning rate {rate:g}, not with that of trainer.optimizer_config; "
            "a range test changes only the latter"
        )

    rates: list[float] = []
    losses: list[float] = []
    ended_by = ""
    while not ended_by and len(losses) < steps:
        logs = trainer.train(tf.constant(1, tf.int32))
        if trainer.has_data_ended:
            ended_by = DATA_ENDED
        elif not math.isfinite(loss := get_training_loss(logs)):
            ended_by = DIVERGED
        else:
            rates.append(rate)
            losses.append(loss)

            # It has diverged when the mean of the last losses is four times the lowest such mean. A
            # loss below 0 has no factor.
            window = _window(steps)
            means = np.ones(1)
            if len(losses) >= window:
                means = np.convolve(losses, np.ones(window) / window, "valid")
            if 0 < means.min() * _FACTOR < means[-1]:
                ended_by = DIVERGED
            rate = float(logs["learning_rate"])

    if len(losses) < _FEWEST and ended_by == DATA_ENDED:
        raise DataError(
            f"task.train_data ended after {len(losses)} steps, "
            f"and a range test needs {_FEWEST}; repeat the data"
        )
    if len(losses) < _FEWEST:
        raise DivergedError(
            f"training diverged after {len(losses)} steps, at the learning rate {rate:.3g}; "
            "begin at a lower rate (--lowest), and look at the data and the loss"
        )
    return RateRange(np.array(rates), np.array(losses), ended_by)


def _refuse_several(names: Collection[str]) -> None:
    if names:
        raise UsageError(
            f"a range test is for one optimizer, and this experiment has {', '.join(names)}: "
            "the loss of one depends on the steps of the others; "
            "choose their rates by short runs"
        )


def _window(steps: int) -> int:
    """Returns the number of steps in a mean loss.

    Fewer than 5 steps would show the noise of single batches.
    """
    return max(5, steps // 20)
