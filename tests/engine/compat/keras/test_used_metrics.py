"""The metrics that a function of a loop by hand can reach."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from trainer_kit.compat.keras.used_metrics import used_metrics

METRICS: dict[str, Any] = {}


def update(value: Any) -> None:
    METRICS["global"].update_state(value)


class Loop:
    """A loop by hand as a class."""

    def __init__(self) -> None:
        self.metrics = {"mine": keras.metrics.Mean("mine")}

    @tf.function
    def step(self, x: Any) -> None:
        self.metrics["mine"].update_state(x)


def calling() -> Any:
    around = [keras.metrics.Mean("around")]

    def step(x: Any) -> None:
        around[0].update_state(x)
        update(x)

    return step


def test_metrics_are_found_where_a_function_has_them() -> None:
    METRICS["global"] = keras.metrics.Mean("global")
    names = lambda function: {metric.name for metric in used_metrics(function)}  # noqa: E731
    assert names(calling()) == names(tf.function(calling())) == {"around", "global"}
    loop = Loop()  # a tf.function does not keep the object whose method it is
    assert names(loop.step) == {"mine"}
