"""Freezes the variables that `trainer.freeze` names: they get no gradient, no optimizer slots and no average."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import check_patterns, native_variable
from trainer_kit.training.initial_weights.variable_matching import layers_of, weights_by_path

_LOG = logging.getLogger(__name__)
_LISTED = 4  # names in a message


def freeze(model: Any, patterns: Sequence[str]) -> list[Any]:
    """Freezes the variables of a built model that a pattern is found in the path of; runs eagerly, in strategy scope.

    They are no longer trainable variables of the model. A layer of Keras all of whose weights are frozen is no longer
    trainable: batch normalization then uses its moving averages and leaves them as they are.

    Args:
      model: A built model of Keras 3; or of tf_keras, of which whole layers can be frozen.
      patterns: Regular expressions; none of them freezes nothing.

    Returns:
      The variables that were trainable before, in order; none without a pattern. The names of slots and averages in
      checkpoints count all of them, so that they do not depend on what is frozen.

    Raises:
      UsageError: when a pattern matches no variable, no trainable variable is left, the model cannot be frozen, or a
        matched variable is a statistic of a layer that is trained.
    """
    if not patterns:
        return []
    weights = weights_by_path(model)
    check_patterns("trainer.freeze", patterns, list(weights))
    before = list(model.trainable_variables)
    frozen = {id(one) for path, one in weights.items() if any(re.search(pattern, path) for pattern in patterns)}
    whole = [layer for layer in layers_below(model) if _ids(layer.weights) and _ids(layer.weights) <= frozen]
    for layer in whole:
        layer.trainable = False
    for variable in model.variables if isinstance(model, keras.Layer) else ():
        if id(native_variable(variable)) in frozen:
            variable.trainable = False
    _check(model, patterns, frozen)
    _check_statistics(model, frozen - _ids(before))
    normalizations = sum("BatchNormalization" in type(layer).__name__ for layer in whole)
    normalized = f", and {normalizations} batch normalizations use their moving averages" if normalizations else ""
    _LOG.info("trainer.freeze: %s of %s variables keep their values%s", len(frozen), len(weights), normalized)
    return before


def layers_below(model: Any) -> Iterator[Any]:
    """Yields a model's layers, and those inside of them, each once."""
    if isinstance(model, tf.Module):  # of tf_keras
        yield from (one for one in model.submodules if hasattr(one, "trainable") and hasattr(one, "weights"))
        return
    waiting, seen = [model], {id(model)}
    while waiting:
        inner = [layer for layer in layers_of(waiting.pop()) if id(layer) not in seen]
        seen |= {id(layer) for layer in inner}
        waiting += inner
        yield from inner


def _ids(variables: Sequence[Any]) -> set[int]:
    return {id(native_variable(one)) for one in variables}


def _check(model: Any, patterns: Sequence[str], frozen: set[int]) -> None:
    left = _ids(model.trainable_variables)
    if not left:
        raise UsageError(
            f"trainer.freeze: {', '.join(patterns)} match all trainable variables; leave some to train, or evaluate "
            "the model with --mode=eval"
        )
    if kept := left & frozen:
        names = [path for path, one in weights_by_path(model).items() if id(one) in kept]
        raise UsageError(
            f"trainer.freeze: {names[0]} of a {type(model).__name__} cannot be frozen by itself; only whole layers of "
            "a tf_keras model can, and any variable of a Keras 3 model"
        )


def _check_statistics(model: Any, untrained: set[int]) -> None:
    """Checks that no layer that is trained may update one of the matched variables that are not trained."""
    still = {one for layer in layers_below(model) if not layer.trainable for one in _ids(layer.weights)}
    if moving := [path for path, one in weights_by_path(model).items() if id(one) in untrained - still]:
        raise UsageError(
            f"trainer.freeze: the statistics {', '.join(moving[:_LISTED])} could change: a layer may update them while "
            "another of its variables is trained; match all variables of the layer, or none of its statistics"
        )
