"""Chooses the executor of a training loop where runtime.executor is auto, from the size of a traced training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.telemetry.flops import count_loop_flops

# Floating-point operations in a training step. On two cores one thread is 1.27 times as fast as the default executor at
# 5 million and 0.71 times at 18 million: docs/development/decisions/single_threaded_executor.md.
MOST_FLOPS = 8_000_000


@dataclass(frozen=True)
class ExecutorChoice:
    """An executor for the training loop, and the reason for the choice.

    Attributes:
      name: default or single_threaded.
      reason: The reason, for the log.
    """

    name: str
    reason: str


def executor_by_weights(weights: Sequence[Any], batch_size: int) -> ExecutorChoice | None:
    """Chooses the default executor if the weights alone show that a step is large; returns None if they do not.

    Args:
      weights: The trainable variables.
      batch_size: The number of examples in a step.
    """
    # A weight of a matrix takes two operations for each example forward, and four backward.
    least = 6 * batch_size * sum(math.prod(weight.shape) for weight in weights if len(weight.shape) > 1)
    return _choice(least, "at least ") if least > MOST_FLOPS else None


def executor_by_graph(graph: tf.Graph | None, batch_size: int) -> ExecutorChoice:
    """Chooses an executor by the floating-point operations of a traced training step, which is only read.

    Args:
      graph: The graph of the training loop; None: the loop is not compiled.
      batch_size: The number of examples in a step.
    """
    if graph is None:
        return ExecutorChoice("default", "the training loop is not compiled")
    counted = count_loop_flops(graph, batch_size)
    if counted.flops is None or counted.problem:
        return ExecutorChoice("default", f"the size of a training step is not known ({counted.problem})")
    return _choice(counted.flops)


def _choice(flops: int, how: str = "") -> ExecutorChoice:
    name = "single_threaded" if flops <= MOST_FLOPS else "default"
    limit = f"one thread is faster up to {MOST_FLOPS / 1e6:.0f} MFLOP"
    return ExecutorChoice(name, f"a training step takes {how}{flops / 1e6:.3g} MFLOP, and {limit}")
