"""Checks of the arguments of `fit` and `train_loop`, with messages in the words of Keras."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.distribution.op_determinism import is_op_determinism_enabled
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.run.runner import run_experiment

_LOG = logging.getLogger(__name__)
_SETTINGS = ("trainer", "runtime", "checkpoint_interval", "fuse_steps")
_NOT_OF_A_FIT = {"trainer", "callbacks", "console", "checkpoint", "eval_name"}  # of run_experiment


def check_options(function: Callable[..., Any], options: Iterable[str]) -> None:
    """Checks the names of the further arguments of `fit` or `train_loop`.

    Raises:
      UsageError: for a name that neither the function nor `run_experiment` has; it gives near names.
    """
    own = [name for name in inspect.signature(function).parameters if name != "options"]
    of_run = inspect.signature(run_experiment).parameters.values()
    further = [one.name for one in of_run if one.default is not one.empty and one.name not in _NOT_OF_A_FIT]
    for name in options:
        if name not in (*_SETTINGS, *further):
            advice = suggestion(name, [*own, *_SETTINGS, *further], listed=len(own) + len(_SETTINGS) + len(further))
            raise UsageError(f"{function.__name__} has no argument {name!r}; {advice}")


def number_of_epochs(epochs: Any) -> int:
    """Returns `epochs` as an int; it may be one of NumPy.

    Raises:
      UsageError: when it is no whole number, such as the text of a command line.
    """
    try:
        return operator.index(epochs)
    except TypeError:
        raise UsageError(f"epochs={epochs!r} is not a whole number; give one, such as 10") from None


def check_frequency(frequency: int | Sequence[int]) -> None:
    """Checks `validation_freq`.

    Raises:
      UsageError: when it is neither a number of epochs, at least 1, nor a list of such numbers.
    """
    epochs = [frequency] if isinstance(frequency, int) else list(frequency)
    if not epochs or min(epochs) < 1:
        raise UsageError(
            f"validation_freq={frequency!r}: give the number of epochs from one evaluation to the next, at least 1, or "
            "a list of the epochs to evaluate after, such as [1, 5, 10]"
        )


def limited(epochs: int, steps_per_epoch: int | None) -> tuple[int, int | None]:
    """Returns both numbers, lowered to the limits that `keras.config` has for trials, with a warning.

    Raises:
      UsageError: when epochs is not a whole number.
    """
    epochs = number_of_epochs(epochs)
    most_epochs, most_steps = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
    if most_epochs and most_epochs < epochs:
        _LOG.warning("epochs is limited to %d by keras.config", most_epochs)
        epochs = most_epochs
    if most_steps and (steps_per_epoch is None or most_steps < steps_per_epoch):
        _LOG.warning("steps_per_epoch is limited to %d by keras.config", most_steps)
        steps_per_epoch = most_steps
    return epochs, steps_per_epoch


def check_dataset(x: Any, options: Mapping[str, Any]) -> None:
    """Checks that a dataset has batches, and was made with the determinism that the run asks for.

    Args:
      x: The training data.
      options: The further arguments of `fit` or `train_loop`.

    Raises:
      UsageError: when it has single numbers, since nothing was batched, or op determinism would come too late.
    """
    if not isinstance(x, tf.data.Dataset):
        return
    if (options.get("runtime") or {}).get("deterministic_ops") and not is_op_determinism_enabled():
        raise UsageError(
            "runtime deterministic_ops comes too late for the dataset, which has been made without it; call "
            "tf.config.experimental.enable_op_determinism() at the start of the program"
        )
    parts = [one.shape for one in tf.nest.flatten(x.element_spec) if isinstance(one, tf.TensorSpec)]
    if single := [str(shape) for shape in parts if shape.rank == 0]:
        raise UsageError(
            f"x is a dataset of single examples: a part of an element has the shape {single[0]}; give batches, such as "
            "x.batch(32)"
        )
