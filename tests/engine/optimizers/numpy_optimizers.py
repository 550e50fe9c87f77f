"""The formulas of optimizers in NumPy, in 64 bits. Each returns the weights and the slots after all
gradients.

They are of those that Keras does not have, or has with other arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
# The weights, and the slots in the order in which the optimizer has them.
Result = tuple[Array, list[Array]]

RATE = 0.1


def adafactor(
    w: Array, gradients: Sequence[Array], decay_rate: float = 0.8, clipping_threshold: float = 1.0
) -> Result:
    rows = np.zeros(w.shape[0])
    columns = np.zeros(w.shape[1])
    for t, g in enumerate(gradients, start=1):
        keep = 1 - t**-decay_rate
        rows = keep * rows + (1 - keep) * np.mean(g**2 + 1e-30, axis=1)
        columns = keep * columns + (1 - keep) * np.mean(g**2 + 1e-30, axis=0)
        update = g / np.sqrt(np.outer(rows / rows.mean(), columns))
        update /= max(1.0, float(np.sqrt(np.mean(update**2))) / clipping_threshold)
        w = w - max(1e-3, float(np.sqrt(np.mean(w**2)))) * min(RATE, 1 / np.sqrt(t)) * update

    return w, [rows, columns, np.outer(rows / rows.mean(), columns)]


def schedule_free_adamw(
    w: Array,
    gradients: Sequence[Array],
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
) -> Result:
    x = w
    z = w
    v = np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        y = (1 - beta_1) * z + beta_1 * x
        v = beta_2 * v + (1 - beta_2) * g**2
        rate = RATE * min(1.0, t / warmup_steps) if warmup_steps else RATE
        z = z - rate * (g / (np.sqrt(v / (1 - beta_2**t)) + epsilon) + weight_decay * y)
        x = (1 - 1 / t) * x + z / t

    return (1 - beta_1) * z + beta_1 * x, [z, v]
