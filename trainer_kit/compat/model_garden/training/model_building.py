"""Builds the models that tasks of Model Garden leave to be built by the first training step.

A model without variables cannot be restored strictly, averaged or counted; so it is called once, in a graph that is
thrown away, on what the data look like. Nothing is read and nothing is computed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf
import tf_keras

from trainer_kit.compat.model_garden.config.build_errors import part_of, told
from trainer_kit.compat.model_garden.config.error_values import one_line
from trainer_kit.errors import TrainerKitError, UsageError


def build_model(task: Any, model: Any, train: bool, dataset: Any = None, sections: Any = None) -> None:
    """Makes the variables of `model` that are not there yet; eager, in strategy scope.

    A model may have a part of them: its layers share variables with another model, which is built. Where such a model
    cannot be called here, the rest is left to the first step.

    Args:
      task: of Model Garden; its train_data, or validation_data, tell what a batch looks like.
      model: of `task.build_model`.
      train: which of both.
      dataset: a ready-made one in place of both, which is not distributed; anything else does not count.
      sections: of all tasks, of several; for messages.

    Raises:
      UsageError, DataError: when the data are not there, or the task cannot call it on such a batch.
    """
    if model is None:
        raise UsageError(f"{type(task).__name__}.build_model returned None; return the model")
    if _has_variables(model):
        if _has_unbuilt_layers(model):
            with contextlib.suppress(TrainerKitError):
                _call(task, model, train, dataset, sections)
        return
    _call(task, model, train, dataset, sections)


def _call(task: Any, model: Any, train: bool, dataset: Any, sections: Any) -> None:
    """Calls the model in a graph that is thrown away; arguments and errors are those of `build_model`."""
    part = "train_data" if train else "validation_data"
    if not isinstance(dataset, tf.data.Dataset):
        data = getattr(task.task_config, part)
        sections = task.task_config if sections is None else sections
        with told(part_of(sections, data), sections):
            dataset = task.build_inputs(data)

    def call(batch: Any) -> Any:
        features = batch[0] if isinstance(batch, tuple) and len(batch) == 2 else batch
        return task.inference_step(features, model)

    try:
        tf.function(call).get_concrete_function(dataset.element_spec)
    except (TypeError, ValueError, LookupError, AttributeError, tf.errors.OpError) as error:
        raise UsageError(
            f"the model {type(model).__name__} has no variables yet, and to make them {type(task).__name__}'s "
            f"inference_step cannot be called on a batch of task.{part}: {one_line(error)}; build it in build_model"
        ) from error


def _has_unbuilt_layers(model: Any) -> bool:
    layers = [one for one in getattr(model, "submodules", ()) if isinstance(one, tf_keras.layers.Layer)]
    return not all(layer.built for layer in layers)


def _has_variables(model: Any) -> bool:
    try:
        return bool(getattr(model, "variables", None))
    except ValueError:  # what a Sequential of Keras 2 says as long as it has none
        return False
