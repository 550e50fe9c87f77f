"""Builds models that Model Garden's tasks leave unbuilt until the first training step.

A model without variables cannot be restored strictly, averaged or counted. So it is called once on the data's element
spec, in a graph that is thrown away. No data is read and nothing is computed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf
import tf_keras

from trainer_kit.compat.model_garden.build_errors import explain_config_errors, part_of
from trainer_kit.errors import TrainerKitError, UsageError
from trainer_kit.process.error_report import reason


def build_model(task: Any, model: Any, train: bool, dataset: Any = None, sections: Any = None) -> None:
    """Creates the missing variables of `model`; runs eagerly, in strategy scope.

    A model may have some of its variables already, because it shares layers with a model that is built. If such a model
    cannot be called here, the rest is left to the first step.

    Args:
      task: A Model Garden task; its train_data or validation_data determines the spec of a batch.
      model: The result of `task.build_model`.
      train: Whether to use train_data, or else validation_data.
      dataset: A ready-made dataset to use instead, if it is a tf.data.Dataset; other objects are ignored.
      sections: The sections of all tasks, if there are several; for error messages.

    Raises:
      UsageError, DataError: when the data is missing, or the task cannot call the model on such a batch.
    """
    if model is None:
        raise UsageError(f"{type(task).__name__}.build_model returned None; return the model")
    try:
        has_variables = bool(getattr(model, "variables", None))
    except ValueError:  # raised by a Keras 2 Sequential that has no variables yet
        has_variables = False
    if not has_variables:
        _call(task, model, train, dataset, sections)
        return

    layers = [layer for layer in getattr(model, "submodules", ()) if isinstance(layer, tf_keras.layers.Layer)]
    if not all(layer.built for layer in layers):
        with contextlib.suppress(TrainerKitError):
            _call(task, model, train, dataset, sections)


def _call(task: Any, model: Any, train: bool, dataset: Any, sections: Any) -> None:
    """Calls the model in a graph that is thrown away; arguments and errors as in `build_model`."""
    part = "train_data" if train else "validation_data"
    if not isinstance(dataset, tf.data.Dataset):
        data = getattr(task.task_config, part)
        sections = task.task_config if sections is None else sections
        with explain_config_errors(part_of(sections, data)):
            dataset = task.build_inputs(data)

    def call(batch: Any) -> Any:
        features = batch[0] if isinstance(batch, tuple) and len(batch) == 2 else batch
        return task.inference_step(features, model)

    try:
        tf.function(call).get_concrete_function(dataset.element_spec)
    except (TypeError, ValueError, LookupError, AttributeError, tf.errors.OpError) as error:
        raise UsageError(
            f"the model {type(model).__name__} has no variables yet, and {type(task).__name__}.inference_step, which "
            f"would create them, fails on a batch of task.{part}: {reason(error)[0]}; build the model in build_model"
        ) from error
