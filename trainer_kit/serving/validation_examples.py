"""Opens the inference of a run or of a model, on examples or on the run's validation data."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.dataset_iterator import explain_missing_files
from trainer_kit.inputs.registered_datasets import get_build_inputs
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.inputs.worker_pipeline import build_one_pass
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.serving.inference_function import (
    InferenceFunction,
    build_inference_function,
    overrides,
)
from trainer_kit.serving.model_loading import LoadedRun, check_built
from trainer_kit.training.checks.batch_spec import select_features
from trainer_kit.typing import NestedSpec, TaskLike


def build_validation_dataset(config: ExperimentConfig, task: TaskLike) -> tf.data.Dataset:
    """Returns one pass over the first validation set of a run. Runs eagerly, on the host.

    Args:
      config: The config of the run.
      task: Its task.

    Raises:
      UsageError: When the run has no validation data.
    """
    name, section = next(iter(get_validation_sets(config.task).items()))
    path = f"validation_data.{name}".rstrip(".")
    if section is None:
        raise UsageError(
            f"task.{path}: the run has no validation data; predict needs --input, and export"
            " examples=features of some examples in one batch"
        )
    # A prediction has all rows.
    if getattr(section, "drop_remainder", False):
        section = section.replace(drop_remainder=False)
    # Each of several tasks reads its own data.
    if isinstance(config.task, MultiTaskConfig):
        task = task.tasks[name]  # type: ignore[attr-defined]
    with explain_missing_files(path), precision_scope(config.runtime):
        data = call_build_inputs(get_build_inputs(task, section), section, None)
        return build_one_pass(data, None)


def take_validation_features(run: LoadedRun, count: int) -> Any:
    """Returns the features of the first examples of a run's validation data. Runs eagerly.

    Args:
      run: The run.
      count: The number of examples. Smaller data has fewer.

    Raises:
      UsageError: When the data is missing or empty.
    """
    dataset = build_validation_dataset(run.config, run.task)

    def select(*parts: Any) -> Any:
        return select_features(parts if len(parts) > 1 else parts[0], run.model)

    # Each batch may be padded to a length of its own.
    for features in dataset.map(select).unbatch().padded_batch(count).take(1):
        return features
    raise UsageError("the validation data has no example")


def get_serving_examples(task: TaskLike) -> Any:
    """Returns the batch of `serving_examples` of a task. None if it has none.

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
    return examples


def open_inference(model: Any, run: LoadedRun | None, examples: Any = None) -> InferenceFunction:
    """Returns the inference of a run or of another model. Runs eagerly, on the host.

    Args:
      model: The model.
      run: The run that the model is from. None: a model of a program.
      examples: A batch, which shows the inputs of a run's `preprocess`, or of a model that is not
        functional. None: the features of the run's validation data.

    Raises:
      UsageError: When nothing shows the inputs.
      DataError: When the validation data cannot be opened.
    """
    if run is not None and examples is None:
        try:
            dataset = build_validation_dataset(run.config, run.task)
            spec = select_features(dataset.element_spec, model)
        except (DataError, UsageError):
            # The data may be on another machine.
            spec = _get_model_spec(model)
            if spec is None:
                raise
        return build_inference_function(run.task, model, spec, applies_preprocess=False)

    spec = None if run is not None else _get_model_spec(model)
    if spec is None:
        if examples is None:
            raise UsageError(
                f"the model {type(model).__name__} does not show its inputs; give arrays, or build"
                " it with keras.Input"
            )
        check_built(model)
        spec = tf.nest.map_structure(_describe_example, examples)
    return build_inference_function(run.task if run else None, model, spec)


def _get_model_spec(model: Any) -> NestedSpec | None:
    """Returns the specs of the inputs of a functional Keras model. None for other models."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    # A Sequential of Keras 3 has no structure of inputs.
    structure = getattr(model, "input", inputs[0])

    def describe(part: Any) -> tf.TensorSpec:
        return tf.TensorSpec(part.shape, part.dtype)

    return tf.nest.map_structure(describe, structure)


def _describe_example(example: Any) -> tf.TensorSpec:
    """Returns the spec of a batch. NumPy's numbers become those of Keras."""
    array = np.asarray(example)
    dtype = np.float32 if array.dtype == np.float64 else array.dtype
    return tf.TensorSpec(array.shape, dtype)


def draw_examples(spec: NestedSpec, count: int) -> Any:
    """Returns random examples for a model: floats in [0, 1), and integers of 0 or 1.

    Args:
      spec: The specs of its inputs.
      count: The number of examples.

    Raises:
      UsageError: When an input is no tensor of numbers of a known shape.
    """
    generator = tf.random.Generator.from_seed(0)

    def draw(part: Any) -> tf.Tensor:
        numbers = generator.uniform([count, *part.shape[1:]])
        if not part.dtype.is_floating:
            numbers = tf.round(numbers)
        return tf.cast(numbers, part.dtype)

    try:
        return tf.nest.map_structure(draw, spec)
    except (AttributeError, TypeError, ValueError, tf.errors.OpError) as error:
        raise UsageError(
            f"export: the model takes {spec}, for which no random numbers can be drawn, and there"
            " is no data to compare the export on; give examples=features of some examples in one"
            " batch"
        ) from error
