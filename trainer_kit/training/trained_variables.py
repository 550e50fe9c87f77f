"""Which variables are trained, and by which optimizer.

The module freezes variables, and creates optimizers by name and moving averages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from trainer_kit.optimizers.per_variable import check_patterns
from trainer_kit.optimizers.periodic import PeriodicOptimizer
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.training.initial_weights.variable_matching import get_child_layers, weights_by_path
from trainer_kit.typing import Model, Optimizer, Optimizers, TaskLike, Variable

if TYPE_CHECKING:
    from trainer_kit.config.schema.experiment import TrainerConfig
    from trainer_kit.config.schema.optimization import NamedOptimizerConfig
    from trainer_kit.config.schema.runtime import RuntimeConfig

_LOG = logging.getLogger(__name__)
# The number of names in a message.
_LISTED = 4


def freeze(model: Model, patterns: Sequence[str]) -> list[Variable]:
    """Freezes the variables of a built model whose path a pattern is found in.

    Runs eagerly, in strategy scope. The variables are no longer trainable variables of the model. A
    layer of Keras all of whose weights are frozen is no longer trainable: batch normalization then
    uses its moving averages and leaves them as they are.

    Args:
      model: A built model of Keras 3, or of tf_keras, of which whole layers can be frozen.
      patterns: Regular expressions. Without patterns, nothing is frozen.

    Returns:
      The variables that were trainable before, in order. Without patterns, the list is empty. The
      names of slots and averages in checkpoints count all of them, so that they do not depend on
      what is frozen.

    Raises:
      UsageError: when a pattern matches no variable, no trainable variable is left, the model
        cannot be frozen, or a matched variable is a statistic of a layer that is trained.
    """
    if not patterns:
        return []

    weights = weights_by_path(model)
    check_patterns("trainer.freeze", patterns, list(weights))
    trainable_before = list(model.trainable_variables)
    frozen_ids = set()
    for path, variable in weights.items():
        if any(re.search(pattern, path) for pattern in patterns):
            frozen_ids.add(id(variable))

    # A layer whose weights are all frozen is frozen as a whole, so that batch normalization uses
    # its moving averages.
    frozen_layers = []
    for layer in layers_below(model):
        weight_ids = _ids(layer.weights)
        if weight_ids and weight_ids <= frozen_ids:
            frozen_layers.append(layer)
    for layer in frozen_layers:
        layer.trainable = False

    # Only Keras 3 has variables that can be frozen by themselves.
    for variable in model.variables if isinstance(model, keras.Layer) else ():
        if id(native_variable(variable)) in frozen_ids:
            variable.trainable = False

    _check(model, patterns, frozen_ids, _ids(trainable_before))

    normalizations = sum("BatchNormalization" in type(layer).__name__ for layer in frozen_layers)
    normalization_text = ""
    if normalizations:
        normalization_text = (
            f", and {normalizations} batch normalizations use their moving averages"
        )
    _LOG.info(
        "trainer.freeze: %s of %s variables keep their values%s",
        len(frozen_ids),
        len(weights),
        normalization_text,
    )
    return trainable_before


def layers_below(model: Model) -> Iterator[keras.layers.Layer]:
    """Yields a model's layers, and those inside of them, each once."""
    # A model of tf_keras.
    if isinstance(model, tf.Module):
        for module in model.submodules:
            if hasattr(module, "trainable") and hasattr(module, "weights"):
                yield module
        return

    pending: list[Any] = [model]
    visited_ids = {id(model)}
    while pending:
        children = get_child_layers(pending.pop())
        new_layers = [layer for layer in children if id(layer) not in visited_ids]
        visited_ids |= {id(layer) for layer in new_layers}
        pending += new_layers
        yield from new_layers


def _ids(variables: Sequence[Variable]) -> set[int]:
    # A Keras variable and its TensorFlow variable count as the same one.
    return {id(native_variable(variable)) for variable in variables}


def _check(
    model: Model, patterns: Sequence[str], frozen_ids: set[int], trainable_before_ids: set[int]
) -> None:
    """Checks that the model has variables to train, and that no matched variable can change."""
    trainable_ids = _ids(model.trainable_variables)
    if not trainable_ids:
        raise UsageError(
            f"trainer.freeze: {', '.join(patterns)} match all trainable variables; "
            "leave some to train, or evaluate the model with --mode=eval"
        )

    weights = weights_by_path(model)
    if not_frozen_ids := trainable_ids & frozen_ids:
        names = [path for path, variable in weights.items() if id(variable) in not_frozen_ids]
        raise UsageError(
            f"trainer.freeze: {names[0]} of a {type(model).__name__} cannot be frozen by itself; "
            "only whole layers of a tf_keras model can, and any variable of a Keras 3 model"
        )

    # A layer that is trained may update its statistics.
    constant_ids: set[int] = set()
    for layer in layers_below(model):
        if not layer.trainable:
            constant_ids |= _ids(layer.weights)

    changing_ids = frozen_ids - trainable_before_ids - constant_ids
    names = [path for path, variable in weights.items() if id(variable) in changing_ids]
    if names:
        raise UsageError(
            f"trainer.freeze: the statistics {', '.join(names[:_LISTED])} could change: "
            "a layer may update them while another of its variables is trained; "
            "match all variables of the layer, or none of its statistics"
        )


def create_optimizers(task: TaskLike, options: TrainerConfig, runtime: RuntimeConfig) -> Optimizers:
    """Returns the task's optimizer, or a dict of those that `trainer.optimizers` names.

    Called in strategy scope.

    Args:
      task: The task, whose create_optimizer creates each optimizer.
      options: The section trainer of the config.
      runtime: The section runtime of the config.

    Raises:
      UsageError: when create_optimizer returns several optimizers for one section.
    """
    sections = _sections(options)
    if not sections:
        return task.create_optimizer(options.optimizer_config, runtime)

    optimizers: dict[str, Optimizer] = {}
    for name, section in sections.items():
        section_runtime = runtime
        if section.loss_scale is not None:
            section_runtime = runtime.replace(loss_scale=section.loss_scale)
        optimizer = task.create_optimizer(section, section_runtime)
        if isinstance(optimizer, Mapping):
            raise UsageError(
                f"{type(task).__name__}.create_optimizer returns several optimizers, "
                "and it is called for each of trainer.optimizers; "
                "return one, or remove trainer.optimizers"
            )
        if section.period > 1:
            optimizer = PeriodicOptimizer(optimizer, section.period, section.accumulate)
        optimizers[name] = optimizer
    return optimizers


def build_task_optimizers(
    optimizer: Optimizers | None, options: TrainerConfig, task: TaskLike, model: Model
) -> Optimizers | None:
    """Creates the slots of an optimizer, or of several, each for its own variables.

    Called in strategy scope. Several optimizers get their own variables if the config or the task's
    `optimizer_variables` says which. Otherwise each has slots for all trainable variables, and the
    task's step decides.

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
    task_variables = _get_optimizer_variables(task, model) if optimizer is not None else {}
    if isinstance(optimizer, Mapping) and (task_variables or _sections(options)):
        owned = partition_variables(optimizer, _sections(options), task_variables, model)
        named_optimizers = NamedOptimizers(optimizer, owned)
        named_optimizers.build()
        log_ownership(owned, model.trainable_variables)
        return named_optimizers

    if task_variables:
        raise UsageError(
            f"{type(task).__name__}.optimizer_variables names the variables of "
            f"{', '.join(task_variables)}, and there is one optimizer; "
            "configure each of them in trainer.optimizers"
        )
    build_optimizers(optimizer, model.trainable_variables)
    return optimizer


def create_moving_average(
    options: TrainerConfig, task: TaskLike, model: Model, trainable: Sequence[Variable] = ()
) -> MovingAverage | None:
    """Returns the moving average of the weights, or of each of several optimizers' variables.

    Called in strategy scope.

    Args:
      options: The section trainer of the config.
      task: The task.
      model: The built model.
      trainable: The variables that were trainable before some were frozen, for the keys in
        checkpoints. Empty: none were frozen.

    Returns:
      The average. None where the config requests none.
    """
    sections = _sections(options)
    averages = {}
    for name, section in sections.items():
        if section.ema is not None:
            averages[name] = section.ema
    if not averages:
        return create_average(model, options.optimizer_config.ema, trainable)

    # Each variable is averaged by the settings of its optimizer.
    task_variables = _get_optimizer_variables(task, model)
    owned = partition_variables(sections, sections, task_variables, model)
    configs: dict[int, EMAConfig] = {}
    for name, ema in averages.items():
        for variable in owned[name]:
            configs[id(native_variable(variable))] = ema

    # Variables of optimizers without an average have no config.
    variables = select_averaged_variables(model, EMAConfig(), trainable)
    variable_configs = [configs.get(id(native_variable(variable))) for variable in variables]
    return MovingAverage(variables, variable_configs)


def _sections(options: TrainerConfig) -> dict[str, NamedOptimizerConfig]:
    sections: Mapping[str, NamedOptimizerConfig] | None = getattr(options, "optimizers", None)
    return dict(sections or {})


def _get_optimizer_variables(task: TaskLike, model: Model) -> dict[str, Sequence[Variable]]:
    # A task of Model Garden has no such method.
    method = getattr(task, "optimizer_variables", None)
    if method is None:
        return {}
    return dict(method(model))
