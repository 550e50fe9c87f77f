"""Tells which methods around batches a callback of Keras 3 or tf_keras has, and which stock callback it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainer_kit.distribution.keras_internals import traces_batches

TRAIN_BATCHES = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCHES = ("on_test_batch_begin", "on_test_batch_end")

# Classes of Keras that always have methods of batches, with the condition under which these do something.
_CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "ModelCheckpoint": lambda one: one.save_freq != "epoch",
    "TensorBoard": lambda one: one.update_freq != "epoch" or traces_batches(one),
    "ProgbarLogger": lambda one: one.verbose == 1,
}


def acts_on_batches(callback: Any, methods: Sequence[str]) -> bool:
    """Whether a callback has one of the methods, in its class or as an attribute, and the method does something.

    Args:
      callback: The callback; its parameters are set.
      methods: TRAIN_BATCHES or TEST_BATCHES.
    """
    if any(method in vars(callback) for method in methods):  # of a LambdaCallback
        return True
    for kind in type(callback).__mro__:
        stock = _is_of_keras(kind)
        if stock and kind.__name__ == "Callback":
            return False
        if any(method in vars(kind) for method in methods):
            condition = _CONDITIONS.get(kind.__name__) if stock else None
            if condition is None or condition(callback):
                return True
    return False


def is_stock(callback: Any, name: str) -> bool:
    """Whether a callback is of the class of Keras with this name, or of a subclass."""
    return any(kind.__name__ == name and _is_of_keras(kind) for kind in type(callback).__mro__)


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("keras", "tf_keras")
