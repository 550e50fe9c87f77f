"""Reads examples of a run's validation data, for exports and predictions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_iterator import explain_missing_files
from trainer_kit.inputs.registered_datasets import get_build_inputs
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.inputs.worker_pipeline import build_one_pass
from trainer_kit.serving.model_loading import LoadedRun
from trainer_kit.training.checks.batch_spec import get_replica_spec, select_features
from trainer_kit.typing import Model, NestedSpec, TaskLike


def build_validation_dataset(
    config: ExperimentConfig,
    task: TaskLike,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns one pass over the first validation set of a run. Runs eagerly, on the host.

    Args:
      config: The config of the run.
      task: Its task.
      input_context: This worker's place. None: all of the data.

    Raises:
      UsageError: When the run has no validation data.
    """
    name, section = next(iter(get_validation_sets(config.task).items()))
    path = f"task.validation_data.{name}".rstrip(".")
    if section is None:
        raise UsageError(f"{path}: the run has no validation data; name the data")
    with explain_missing_files(path):
        data = call_build_inputs(get_build_inputs(task, section), section, input_context)
        return build_one_pass(data, input_context)


def get_serving_examples(task: TaskLike) -> Any:
    """Returns the batch of `serving_examples` of a task as tensors. None if it has none."""
    get_examples = getattr(task, "serving_examples", None)
    examples = None if get_examples is None else get_examples()
    return None if examples is None else tf.nest.map_structure(tf.convert_to_tensor, examples)


def get_features_spec(run: LoadedRun) -> NestedSpec:
    """Returns the specs of the features of a run's validation data. No data is read."""
    dataset = build_validation_dataset(run.config, run.task)
    return select_features(get_replica_spec(dataset.element_spec), run.model)


def take_features(dataset: tf.data.Dataset, model: Model, count: int) -> Any:
    """Returns the features of the first examples of a dataset of batches. Runs eagerly.

    Args:
      dataset: The dataset.
      model: The model, which decides what of a batch are features.
      count: The number of examples. A shorter dataset has fewer.

    Raises:
      UsageError: When the dataset is empty.
    """
    features = dataset.map(lambda *batch: select_features(_get_element(batch), model))
    for batch in features.rebatch(count).take(1):
        return batch
    raise UsageError("the data has no example")


def _get_element(parts: tuple[Any, ...]) -> Any:
    """Returns the element of a dataset, of which `map` spreads a tuple."""
    return parts if len(parts) > 1 else parts[0]
