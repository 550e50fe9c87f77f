"""The function that is exported: a task's inference, with named inputs and outputs."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.training.task import Task, full_precision
from trainer_kit.typing import Model, NestedSpec, TaskLike


@dataclass(frozen=True)
class InferenceFunction:
    """Inference on a batch of any size.

    Attributes:
      task: The task. None: the inference is a call of the model.
      model: The model, whose variables the function reads.
      features_spec: The structure that the task's inference takes.
      input_specs: The inputs by name. The first dimension is the batch, and open.
      output_specs: The outputs by name.
      function: A tf.function from the inputs, in their order, to a dict of the outputs.
    """

    task: TaskLike | None
    model: Model
    features_spec: NestedSpec
    input_specs: Mapping[str, tf.TensorSpec]
    output_specs: Mapping[str, tf.TensorSpec]
    function: Any

    def __call__(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the outputs as NumPy arrays. Runs eagerly, on the host."""
        arguments = []
        for name, spec in self.input_specs.items():
            arguments.append(tf.convert_to_tensor(values[name], spec.dtype))
        outputs = self.function(*arguments)
        arrays: dict[str, np.ndarray] = tf.nest.map_structure(to_array, outputs)
        return arrays

    def name_features(self, features: Any) -> dict[str, Any]:
        """Returns the parts of features by the names of the inputs.

        Raises:
          UsageError: When they have another structure.
        """
        try:
            tf.nest.assert_same_structure(features, self.features_spec, check_types=False)
        except (ValueError, TypeError) as error:
            raise UsageError(f"the arrays have not the structure {self.features_spec}") from error
        parts = tf.nest.flatten(features)
        return dict(zip(self.input_specs, parts, strict=True))


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """Returns a tensor as an array. Texts are bytes of one length, which files can contain."""
    array = tensor.numpy()
    return array.astype("S") if array.dtype == object else array


def build_inference_function(
    task: TaskLike | None, model: Model, features_spec: NestedSpec, applies_preprocess: bool = True
) -> InferenceFunction:
    """Returns the inference of a task, between its `preprocess` and its `postprocess`.

    Runs eagerly, on the host.

    Args:
      task: The task. None: the inference is a call of the model.
      model: The model, with the weights to export.
      features_spec: The specs of the inputs of `preprocess`, or of the features.
      applies_preprocess: Whether `preprocess` comes first.

    Raises:
      UsageError: When an input is no dense tensor with a batch dimension, or the inference does not
        take the inputs.
    """
    # A functional model has names for its inputs.
    names = []
    for tensor in getattr(model, "inputs", None) or ():
        name, _, _ = tensor.name.partition(":")
        names.append(name)
    # Keras 3 and Keras 2 give these names to inputs without a name.
    if any(re.fullmatch(r"(keras_tensor|input_layer)(_\d+)?|input_\d+", name) for name in names):
        names = []

    input_specs = {}
    for name, spec in name_tensors(features_spec, "inputs", names).items():
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            raise UsageError(
                f"the input {name!r} is {spec}; an export takes dense tensors whose first dimension"
                " is the batch"
            )
        open_shape = [None, *spec.shape[1:]]
        input_specs[name] = tf.TensorSpec(open_shape, spec.dtype, name)

    # Tasks of TF Model Garden have neither of the two.
    preprocess: Callable[[Any], Any] | None = getattr(task, "preprocess", None)
    postprocess: Callable[[Any], Any] | None = getattr(task, "postprocess", None)

    @tf.function(input_signature=list(input_specs.values()), autograph=False)
    def infer(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        features = tf.nest.pack_sequence_as(features_spec, tensors)
        if preprocess is not None and applies_preprocess:
            features = apply_autograph(preprocess)(features)
        if task is None:
            outputs = apply_autograph(model)(features, training=False)
        else:
            outputs = apply_autograph(task.inference_step)(features, model)
        if postprocess is not None:
            outputs = apply_autograph(postprocess)(outputs)
        return name_tensors(full_precision(outputs), "outputs")

    try:
        outputs = infer.get_concrete_function().structured_outputs
        output_specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, outputs)
    except (ValueError, TypeError) as error:
        name = type(task or model).__name__
        raise UsageError(f"{name} does not take {features_spec} as input: {error}") from error
    return InferenceFunction(
        task=task,
        model=model,
        features_spec=features_spec,
        input_specs=input_specs,
        output_specs=output_specs,
        function=infer,
    )


def overrides(task: TaskLike | None, name: str) -> bool:
    """Whether a task overrides a method of Task. False without a task."""
    method = getattr(type(task), name, None)
    return method is not None and method is not getattr(Task, name)


def name_tensors(structure: Any, single_name: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the tensors of a structure by names, in the order of tf.nest.

    A key of a dict is a name, and so is the index in a list after `single_name`, which is also the
    name of a tensor alone.

    Args:
      structure: The tensors or specs.
      single_name: The name of a tensor alone.
      names: The names that the model has for a tensor alone or for the items of a list.

    Raises:
      UsageError: When two tensors have the same name.
    """
    tensors = tf.nest.flatten(structure)
    count = len(tensors)
    if isinstance(structure, Mapping) or len(names) != count:
        # keras.tree has paths, and another order than tf.nest for some kinds of dict.
        numbers = tf.nest.pack_sequence_as(structure, list(range(count)))
        paths = sorted(keras.tree.flatten_with_path(numbers), key=operator.itemgetter(1))
        names = []
        for path, _ in paths:
            parts = [str(part) for part in path]
            if not parts or parts[0].isdigit():
                parts.insert(0, single_name)
            names.append("_".join(parts))

    named_tensors = {}
    for name, tensor in zip(names, tensors, strict=True):
        argument = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not re.match("[A-Za-z]", argument) or keyword.iskeyword(argument) or argument == "self":
            argument = f"{single_name}_{argument}"
        named_tensors[argument] = tensor
    if len(named_tensors) < count:
        raise UsageError(f"two tensors would have one name: {', '.join(names)}; rename the keys")
    return named_tensors
