"""The formulas of all optimizers in NumPy, in 64 bits. Each returns the weights and the slots after all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Result = tuple[Array, list[Array]]  # the weights, and the slots in the order in which the optimizer has them

RATE = 0.1


def sgd(w: Array, gradients: Sequence[Array], momentum: float = 0.0, nesterov: bool = False) -> Result:
    velocity = np.zeros_like(w)
    for g in gradients:
        velocity = momentum * velocity - RATE * g
        w = w + (momentum * velocity - RATE * g if nesterov else velocity)
    return w, [velocity] if momentum else []


def adam(
    w: Array,
    gradients: Sequence[Array],
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    amsgrad: bool = False,
    weight_decay_rate: float = 0.0,
) -> Result:
    m, v, largest = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        w = w - RATE * weight_decay_rate * w
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2
        largest = np.maximum(largest, v)
        alpha = RATE * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        w = w - alpha * m / (np.sqrt(largest if amsgrad else v) + epsilon)
    return w, [m, v, largest] if amsgrad else [m, v]


def adamw(w: Array, gradients: Sequence[Array], gradient_clip_norm: float = 1.0, **fields: Any) -> Result:
    bound = gradient_clip_norm or np.inf
    return adam(w, [g * min(1.0, bound / np.linalg.norm(g)) for g in gradients], **fields)


def lamb(w: Array, gradients: Sequence[Array], weight_decay_rate: float = 0.0) -> Result:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        w = w - RATE * weight_decay_rate * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        update = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
        w = w - RATE * np.linalg.norm(w) / np.linalg.norm(update) * update
    return w, [m, v]


def rmsprop(
    w: Array, gradients: Sequence[Array], rho: float = 0.9, momentum: float = 0.0, centered: bool = False
) -> Result:
    square, mean, velocity = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for g in gradients:
        square, mean = rho * square + (1 - rho) * g**2, rho * mean + (1 - rho) * g
        variance = square - mean**2 if centered else square
        velocity = momentum * velocity + RATE * g / np.sqrt(variance + 1e-7)
        w = w - velocity
    return w, [square, *([velocity] if momentum else []), *([mean] if centered else [])]


def adagrad(w: Array, gradients: Sequence[Array], initial_accumulator_value: float = 0.1) -> Result:
    total = np.full_like(w, initial_accumulator_value)
    for g in gradients:
        total = total + g**2
        w = w - RATE * g / np.sqrt(total + 1e-7)
    return w, [total]


def adafactor(w: Array, gradients: Sequence[Array], decay_rate: float = 0.8, clipping_threshold: float = 1.0) -> Result:
    rows, columns = np.zeros(w.shape[0]), np.zeros(w.shape[1])
    for t, g in enumerate(gradients, start=1):
        keep = 1 - t**-decay_rate
        rows = keep * rows + (1 - keep) * np.mean(g**2 + 1e-30, axis=1)
        columns = keep * columns + (1 - keep) * np.mean(g**2 + 1e-30, axis=0)
        update = g / np.sqrt(np.outer(rows / rows.mean(), columns))
        update /= max(1.0, float(np.sqrt(np.mean(update**2))) / clipping_threshold)
        w = w - max(1e-3, float(np.sqrt(np.mean(w**2)))) * min(RATE, 1 / np.sqrt(t)) * update
    return w, [rows, columns, np.outer(rows / rows.mean(), columns)]


def lars(
    w: Array,
    gradients: Sequence[Array],
    momentum: float = 0.9,
    eeta: float = 0.001,
    weight_decay_rate: float = 0.0,
    nesterov: bool = False,
    classic_momentum: bool = True,
    exclude_from_layer_adaptation: Sequence[str] = (),
) -> Result:
    def trust(step: Array) -> float:
        return 1.0 if exclude_from_layer_adaptation else eeta * float(np.linalg.norm(w) / np.linalg.norm(step))

    velocity = np.zeros_like(w)
    for g in gradients:
        added = g + weight_decay_rate * w
        added = RATE * trust(added) * added if classic_momentum else added
        velocity = momentum * velocity + added
        update = momentum * velocity + added if nesterov else velocity
        w = w - (update if classic_momentum else RATE * trust(update) * update)
    return w, [velocity]


def nadam(
    w: Array,
    gradients: Sequence[Array],
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    weight_decay: float = 0.0,
) -> Result:
    m, v, product = np.zeros_like(w), np.zeros_like(w), 1.0
    for t, g in enumerate(gradients, start=1):
        w = w - RATE * weight_decay * w
        now, following = (beta_1 * (1 - 0.5 * 0.96**step) for step in (t, t + 1))
        product *= now
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2
        mean = following * m / (1 - product * following) + (1 - now) * g / (1 - product)
        w = w - RATE * mean / (np.sqrt(v / (1 - beta_2**t)) + epsilon)
    return w, [m, v, np.array(product)]


def adamax(
    w: Array, gradients: Sequence[Array], beta_1: float = 0.9, beta_2: float = 0.999, weight_decay: float = 0.0
) -> Result:
    m, largest = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        w = w - RATE * weight_decay * w
        m, largest = beta_1 * m + (1 - beta_1) * g, np.maximum(beta_2 * largest, np.abs(g))
        w = w - RATE / (1 - beta_1**t) * m / (largest + 1e-7)
    return w, [m, largest]


def adadelta(
    w: Array, gradients: Sequence[Array], rho: float = 0.95, epsilon: float = 1e-7, weight_decay: float = 0.0
) -> Result:
    squares, changes = np.zeros_like(w), np.zeros_like(w)
    for g in gradients:
        w = w - RATE * weight_decay * w
        squares = rho * squares + (1 - rho) * g**2
        change = np.sqrt(changes + epsilon) / np.sqrt(squares + epsilon) * g
        changes = rho * changes + (1 - rho) * change**2
        w = w - RATE * change
    return w, [squares, changes]


def ftrl(
    w: Array,
    gradients: Sequence[Array],
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    l2_shrinkage_regularization_strength: float = 0.0,
    beta: float = 0.0,
    weight_decay: float = 0.0,
) -> Result:
    total, linear = np.full_like(w, initial_accumulator_value), np.zeros_like(w)
    l1, power = l1_regularization_strength, -learning_rate_power
    for g in gradients:
        w = w - RATE * weight_decay * w
        new = total + g**2
        linear += g + 2 * l2_shrinkage_regularization_strength * w - (new**power - total**power) / RATE * w
        total = new
        strength = (total**power + beta) / RATE + 2 * l2_regularization_strength
        w = np.where(np.abs(linear) <= l1, 0.0, (np.sign(linear) * l1 - linear) / strength)
    return w, [total, linear]


def lion(
    w: Array, gradients: Sequence[Array], beta_1: float = 0.9, beta_2: float = 0.99, weight_decay: float = 0.0
) -> Result:
    m = np.zeros_like(w)
    for g in gradients:
        w = w - RATE * weight_decay * w
        w = w - RATE * np.sign(beta_1 * m + (1 - beta_1) * g)
        m = beta_2 * m + (1 - beta_2) * g
    return w, [m]


def muon(
    w: Array,
    gradients: Sequence[Array],
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    rms_rate: float | None = 0.2,
    weight_decay: float = 0.004,
    adam_weight_decay: float = 0.004,
    adam_lr_ratio: float = 1.0,
    exclude_layers: Sequence[str] = (),
) -> Result:
    if exclude_layers:
        assert adam_lr_ratio == 1.0
        return adam(w, gradients, weight_decay_rate=adam_weight_decay)
    m = np.zeros_like(w)
    for g in gradients:
        w = w - RATE * weight_decay * w
        m = momentum * m + g
        x = g + momentum * m if nesterov else m
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(ns_steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        w = w - RATE * x * (np.sqrt(max(w.shape)) * rms_rate if rms_rate else 1.0)
    return w, [m]


def schedule_free_adamw(
    w: Array,
    gradients: Sequence[Array],
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
) -> Result:
    x, z, v = w, w, np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        y = (1 - beta_1) * z + beta_1 * x
        v = beta_2 * v + (1 - beta_2) * g**2
        rate = RATE * min(1.0, t / warmup_steps) if warmup_steps else RATE
        z = z - rate * (g / (np.sqrt(v / (1 - beta_2**t)) + epsilon) + weight_decay * y)
        x = (1 - 1 / t) * x + z / t
    return (1 - beta_1) * z + beta_1 * x, [z, v]
