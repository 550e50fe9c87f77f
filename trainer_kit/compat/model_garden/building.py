"""Builds the models that their tasks leave to be built by the first training step.

A model without variables cannot be restored strictly, averaged or counted; so it is called once, in a graph that is
thrown away, on what the data look like. Nothing is read and nothing is computed.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.compat.model_garden.error_values import one_line
from trainer_kit.compat.model_garden.refusals import part_of, told
from trainer_kit.errors import UsageError


def build_model(task: Any, model: Any, train: bool, dataset: Any = None, sections: Any = None) -> None:
    """Makes the variables of `model` if it has none yet; eager, in strategy scope.

    Args:
      task: theirs; its train_data, or validation_data, tell what a batch looks like.
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
        return
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


def _has_variables(model: Any) -> bool:
    try:
        return bool(getattr(model, "variables", None))
    except ValueError:  # what a Sequential of Keras 2 says as long as it has none
        return False
