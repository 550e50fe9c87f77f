"""Reads examples of a run's validation data, for exports and predictions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_iterator import explain_missing_files
from trainer_kit.inputs.registered_datasets import get_build_inputs
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.inputs.worker_pipeline import build_one_pass
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.serving.inference_function import overrides
from trainer_kit.training.checks.batch_spec import get_replica_spec, select_features
from trainer_kit.typing import Model, NestedSpec, TaskLike


def build_validation_dataset(config: ExperimentConfig, task: TaskLike) -> tf.data.Dataset:
    """Returns one pass over the first validation set of a run. Runs eagerly, on the host.

    Args:
      config: The config of the run.
      task: Its task.

    Raises:
      UsageError: When the run has no validation data.
    """
    name, section = next(iter(get_validation_sets(config.task).items()))
    path = f"task.validation_data.{name}".rstrip(".")
    if section is None:
        raise UsageError(f"{path}: the run has no validation data; name the data")
    # A prediction has all rows.
    if getattr(section, "drop_remainder", False):
        section = section.replace(drop_remainder=False)
    # Each of several tasks reads its own data.
    if isinstance(config.task, MultiTaskConfig):
        task = task.tasks[name]  # type: ignore[attr-defined]
    with explain_missing_files(path), precision_scope(config.runtime):
        data = call_build_inputs(get_build_inputs(task, section), section, None)
        return build_one_pass(data, None)


def get_serving_examples(task: TaskLike) -> Any:
    """Returns the batch of `serving_examples` of a task as tensors. None if it has none.

    Raises:
      UsageError: When the task has a `preprocess`, whose inputs are not known then.
    """
    get_examples = getattr(task, "serving_examples", None)
    examples = None if get_examples is None else get_examples()
    if examples is None and overrides(task, "preprocess"):
        raise UsageError(
            f"{type(task).__name__} has a preprocess, and no serving_examples; define it to return"
            " a batch of what preprocess takes"
        )
    return None if examples is None else tf.nest.map_structure(tf.convert_to_tensor, examples)


def get_features_spec(dataset: tf.data.Dataset, model: Model) -> NestedSpec:
    """Returns the specs of the features of a dataset of batches. No data is read."""
    return select_features(get_replica_spec(dataset.element_spec), model)


def get_model_spec(model: Any) -> NestedSpec | None:
    """Returns the specs of the inputs of a functional Keras model. None for other models."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    # A Sequential of Keras 3 has no structure of inputs.
    structure = getattr(model, "input", None)
    if structure is None:
        structure = inputs[0]

    def describe_input(part: Any) -> tf.TensorSpec:
        return tf.TensorSpec(part.shape, part.dtype)

    return tf.nest.map_structure(describe_input, structure)


def take_features(dataset: tf.data.Dataset, model: Model, count: int) -> Any:
    """Returns the features of the first examples of a dataset of batches. Runs eagerly.

    Args:
      dataset: The dataset.
      model: The model, which decides what of a batch are features.
      count: The number of examples. A smaller first batch has fewer.

    Raises:
      UsageError: When the dataset is empty.
    """
    for batch in dataset.take(1):
        features = select_features(batch, model)
        return tf.nest.map_structure(lambda part: part[:count], features)
    raise UsageError("the data has no example")
