"""Converts the code of tasks, models and subclasses with AutoGraph.

AutoGraph turns conditions on tensors into graph operations.

The framework's own code needs no conversion and is marked `do_not_convert`: converting its 25
functions took a third of the time from the first batch to the first step. So it calls code that
users may have written through `apply_autograph`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.runtime.tensorflow_internals import convert_with_autograph


def apply_autograph(function: Callable[..., object]) -> Callable[..., Any]:
    """Returns `function`, a model or a layer, converted by AutoGraph.

    The conversion happens while a graph is traced. In eager mode `function` is returned unchanged.

    Functions marked `tf.autograph.experimental.do_not_convert` and the layers of Keras 3 behave as
    before, because AutoGraph does not convert them.
    """
    if tf.executing_eagerly():
        return function
    return convert_with_autograph(function)
