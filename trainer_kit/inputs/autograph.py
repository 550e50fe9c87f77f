"""What a task, a model or a subclass brings, in graph: AutoGraph makes graph of its `if` and `while` over tensors.

The code of the framework needs none of that and is marked `do_not_convert`: converting its 25 functions took a third of
the time from the first batch to the first step. So it calls what others may have written through `converted`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import converted_by_autograph


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, a model or a layer as AutoGraph has it in a graph, and as it is when run eagerly.

    A framework's own function, marked `tf.autograph.experimental.do_not_convert`, and the layers of Keras 3, which
    AutoGraph leaves alone, come back to the same effect.
    """
    if tf.executing_eagerly():
        return function
    return converted_by_autograph(function)
