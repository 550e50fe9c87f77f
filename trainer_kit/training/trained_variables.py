"""Which variables are trained, and by which optimizer: freezing, optimizers by name, and moving averages."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.config.schema.optimization import EMAConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import build_optimizers
from trainer_kit.optimizers.moving_average import (
    MovingAverage,
    create_average,
    select_averaged_variables,
)
from trainer_kit.optimizers.named_optimizers import (
    NamedOptimizers,
    log_ownership,
    partition_variables,
)
from trainer_kit.optimizers.per_variable import check_patterns, native_variable
from trainer_kit.optimizers.periodic import PeriodicOptimizer
from trainer_kit.training.initial_weights.variable_matching import get_child_layers, weights_by_path

_LOG = logging.getLogger(__name__)
_LISTED = 4  # names in a message


def freeze(model: Any, patterns: Sequence[str]) -> list[Any]:
    """Freezes the variables of a built model that a pattern is found in the path of; runs eagerly, in strategy scope.

    They are no longer trainable variables of the model. A layer of Keras all of whose weights are
    frozen is no longer
    trainable: batch normalization then uses its moving averages and leaves them as they are.

    Args:
      model: A built model of Keras 3; or of tf_keras, of which whole layers can be frozen.
      patterns: Regular expressions; none of them freezes nothing.

    Returns:
      The variables that were trainable before, in order; none without a pattern. The names of slots
      and averages in checkpoints count all of them, so that they do not depend on what is frozen.

    Raises:
      UsageError: when a pattern matches no variable, no trainable variable is left, the model
        cannot be frozen, or a matched variable is a statistic of a layer that is trained.
    """
    if not patterns:
        return []
    weights = weights_by_path(model)
    check_patterns("trainer.freeze", patterns, list(weights))
    before = list(model.trainable_variables)
    frozen = {
        id(one)
        for path, one in weights.items()
        if any(re.search(pattern, path) for pattern in patterns)
    }
    whole = [
        layer
        for layer in layers_below(model)
        if _ids(layer.weights) and _ids(layer.weights) <= frozen
    ]
    for layer in whole:
        layer.trainable = False
    for variable in model.variables if isinstance(model, keras.Layer) else ():
        if id(native_variable(variable)) in frozen:
            variable.trainable = False
    _check(model, patterns, frozen)
    _check_statistics(model, frozen - _ids(before))
    normalizations = sum("BatchNormalization" in type(layer).__name__ for layer in whole)
    normalized = (
        f", and {normalizations} batch normalizations use their moving averages"
        if normalizations
        else ""
    )
    _LOG.info(
        "trainer.freeze: %s of %s variables keep their values%s",
        len(frozen),
        len(weights),
        normalized,
    )
    return before


def layers_below(model: Any) -> Iterator[Any]:
    """Yields a model's layers, and those inside of them, each once."""
    if isinstance(model, tf.Module):  # of tf_keras
        yield from (
            one for one in model.submodules if hasattr(one, "trainable") and hasattr(one, "weights")
        )
        return
    waiting, seen = [model], {id(model)}
    while waiting:
        inner = [layer for layer in get_child_layers(waiting.pop()) if id(layer) not in seen]
        seen |= {id(layer) for layer in inner}
        waiting += inner
        yield from inner


def _ids(variables: Sequence[Any]) -> set[int]:
    return {id(native_variable(one)) for one in variables}


def _check(model: Any, patterns: Sequence[str], frozen: set[int]) -> None:
    left = _ids(model.trainable_variables)
    if not left:
        raise UsageError(
            f"trainer.freeze: {', '.join(patterns)} match all trainable variables; leave some to"
            " train, or evaluate the model with --mode=eval"
        )
    if kept := left & frozen:
        names = [path for path, one in weights_by_path(model).items() if id(one) in kept]
        raise UsageError(
            f"trainer.freeze: {names[0]} of a {type(model).__name__} cannot be frozen by itself;"
            " only whole layers of a tf_keras model can, and any variable of a Keras 3 model"
        )


def _check_statistics(model: Any, untrained: set[int]) -> None:
    """Checks that no layer that is trained may update one of the matched variables that are not trained."""
    still = {
        one for layer in layers_below(model) if not layer.trainable for one in _ids(layer.weights)
    }
    if moving := [
        path for path, one in weights_by_path(model).items() if id(one) in untrained - still
    ]:
        raise UsageError(
            f"trainer.freeze: the statistics {', '.join(moving[:_LISTED])} could change: a layer"
            " may update them while another of its variables is trained; match all variables of"
            " the layer, or none of its statistics"
        )


def create_optimizers(task: Any, options: Any, runtime: Any) -> Any:
    """Returns the task's optimizer, or a dict of those that `trainer.optimizers` names; called in strategy scope.

    Args:
      task: The task, whose create_optimizer makes each optimizer.
      options: The section trainer of the config.
      runtime: The section runtime of the config.
    """
    sections = _sections(options)
    if not sections:
        return task.create_optimizer(options.optimizer_config, runtime)
    made = {}
    for name, section in sections.items():
        own = (
            runtime
            if section.loss_scale is None
            else runtime.replace(loss_scale=section.loss_scale)
        )
        optimizer = task.create_optimizer(section, own)
        if isinstance(optimizer, Mapping):
            raise UsageError(
                f"{type(task).__name__}.create_optimizer returns several optimizers, and it is"
                " called for each of trainer.optimizers; return one, or remove trainer.optimizers"
            )
        if section.period > 1:
            optimizer = PeriodicOptimizer(optimizer, section.period, section.accumulate)
        made[name] = optimizer
    return made


def build_task_optimizers(optimizer: Any, options: Any, task: Any, model: Any) -> Any:
    """Creates the slots of an optimizer, or of several, each for its own variables; called in strategy scope.

    Several get variables of their own if the config or the task's `optimizer_variables` says which.
    Otherwise each has slots for all trainable variables, and the task's step decides.

    Args:
      optimizer: The optimizer, a dict of optimizers, or None.
      options: The section trainer of the config.
      task: The task.
      model: The built model.

    Returns:
      The optimizer, or NamedOptimizers in place of a dict.

    Raises:
      UsageError: when an optimizer has no variables, or a variable has two optimizers.
    """
    given = _get_optimizer_variables(task, model) if optimizer is not None else {}
    if isinstance(optimizer, Mapping) and (given or _sections(options)):
        owned = partition_variables(optimizer, _sections(options), given, model)
        several = NamedOptimizers(optimizer, owned)
        several.build()
        log_ownership(owned, model.trainable_variables)
        return several
    if given:
        raise UsageError(
            f"{type(task).__name__}.optimizer_variables names the variables of {', '.join(given)},"
            " and there is one optimizer; configure each of them in trainer.optimizers"
        )
    build_optimizers(optimizer, model.trainable_variables)
    return optimizer


def moving_average(
    options: Any, task: Any, model: Any, trainable: Sequence[Any] = ()
) -> MovingAverage | None:
    """Returns the moving average of the weights, or of each of several optimizers' variables; called in strategy scope.

    Args:
      options: The section trainer of the config.
      task: The task.
      model: The built model.
      trainable: The variables that were trainable before some were frozen, for the keys in
        checkpoints; empty: none were.

    Returns:
      The average; None where the config asks for none.
    """
    sections = _sections(options)
    if averaged := {name: one.ema for name, one in sections.items() if one.ema is not None}:
        owned = partition_variables(
            sections, sections, _get_optimizer_variables(task, model), model
        )
        configs = {
            id(native_variable(variable)): ema
            for name, ema in averaged.items()
            for variable in owned[name]
        }
        variables = select_averaged_variables(model, EMAConfig(), trainable)
        return MovingAverage(
            variables, [configs.get(id(native_variable(variable))) for variable in variables]
        )
    return create_average(model, options.optimizer_config.ema, trainable)


def _sections(options: Any) -> dict[str, Any]:
    return dict(getattr(options, "optimizers", None) or {})


def _get_optimizer_variables(task: Any, model: Any) -> dict[str, Any]:
    method = getattr(task, "optimizer_variables", None)
    return {} if method is None else dict(method(model))
