"""The function that is exported: a task's inference, with named inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.training.task import Task, full_precision
from trainer_kit.typing import Model, NestedSpec, TaskLike

_INPUTS = "inputs"
_OUTPUTS = "outputs"


@dataclass(frozen=True)
class InferenceFunction:
    """Inference on a batch of any size.

    Attributes:
      model: The model, whose variables the function reads.
      input_specs: The inputs by name. The first dimension is the batch, and open.
      output_specs: The outputs by name.
      function: A tf.function from the inputs, in their order, to a dict of the outputs.
      features_spec: The structure that the task's inference takes.
      has_only_model: Whether the task adds no `preprocess` and no `postprocess` to the model.
    """

    model: Model
    input_specs: Mapping[str, tf.TensorSpec]
    output_specs: Mapping[str, tf.TensorSpec]
    function: Any
    features_spec: NestedSpec
    has_only_model: bool = True

    def __call__(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the outputs as NumPy arrays. Runs eagerly, on the host."""
        arguments = []
        for name, spec in self.input_specs.items():
            arguments.append(tf.convert_to_tensor(values[name], spec.dtype))
        outputs = self.function(*arguments)
        return {name: to_array(tensor) for name, tensor in outputs.items()}

    def flatten_features(self, features: Any) -> dict[str, np.ndarray]:
        """Returns the features of a batch as NumPy arrays by the names of the inputs."""
        tf.nest.assert_same_structure(features, self.features_spec)
        parts = [to_array(part) for part in tf.nest.flatten(features)]
        return dict(zip(self.input_specs, parts, strict=True))


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """Returns a tensor as an array. Texts are bytes of one length, which files can contain."""
    array = tensor.numpy()
    return array.astype("S") if array.dtype == object else array


def build_inference_function(
    task: TaskLike | None, model: Model, features_spec: NestedSpec, is_raw: bool = True
) -> InferenceFunction:
    """Returns the inference of a task, between its `preprocess` and its `postprocess`.

    Runs eagerly, on the host.

    Args:
      task: The task. None: the inference is a call of the model.
      model: The model, with the weights to export.
      features_spec: The specs of the inputs of `preprocess`, or of the features.
      is_raw: Whether `preprocess` comes first.

    Raises:
      UsageError: When an input is no dense tensor with a batch dimension, or the inference does not
        take the inputs.
    """
    names = name_tensors(features_spec, _INPUTS, _get_input_names(model))
    specs = []
    for name, spec in zip(names, tf.nest.flatten(features_spec), strict=True):
        specs.append(_open_batch(name, spec))

    preprocess: Callable[[Any], Any] | None = getattr(task, "preprocess", None)

    @tf.function(input_signature=specs, autograph=False)
    def infer(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        features = tf.nest.pack_sequence_as(features_spec, tensors)
        if is_raw and preprocess is not None:
            features = apply_autograph(preprocess)(features)
        outputs = full_precision(run_inference(task, model, features))
        output_names = name_tensors(outputs, _OUTPUTS)
        return dict(zip(output_names, tf.nest.flatten(outputs), strict=True))

    try:
        outputs = infer.get_concrete_function().structured_outputs
    except ValueError as error:
        name = type(model if task is None else task).__name__
        raise UsageError(f"{name} does not take {features_spec} as input: {error}") from error
    output_specs = {}
    for name, tensor in outputs.items():
        output_specs[name] = tf.TensorSpec(tensor.shape, tensor.dtype, name)
    return InferenceFunction(
        model=model,
        input_specs={spec.name: spec for spec in specs},
        output_specs=output_specs,
        function=infer,
        features_spec=features_spec,
        has_only_model=not (overrides(task, "preprocess") or overrides(task, "postprocess")),
    )


def overrides(task: TaskLike | None, name: str) -> bool:
    """Whether a task has its own method in place of that of Task. No task has none."""
    method = getattr(type(task), name, None)
    return method is not None and method is not getattr(Task, name)


def run_inference(task: TaskLike | None, model: Model, features: Any) -> Any:
    """Returns the outputs of a task for features, in inference mode. Runs in graph."""
    if task is None:
        return apply_autograph(model)(features, training=False)
    outputs = apply_autograph(task.inference_step)(features, model)
    # Tasks of TF Model Garden have no such method.
    postprocess: Callable[[Any], Any] | None = getattr(task, "postprocess", None)
    return outputs if postprocess is None else apply_autograph(postprocess)(outputs)


def _get_input_names(model: Model) -> list[str]:
    """Returns the names that a functional model has given its inputs. Empty if it has none."""
    names = []
    for tensor in getattr(model, "inputs", None) or ():
        name = tensor.name.partition(":")[0]
        # Keras 3 and Keras 2 name an input so that has no name.
        if re.fullmatch(r"keras_tensor(_\d+)?|input_\d+", name):
            return []
        names.append(_clean_name(name))
    return names


def name_tensors(structure: Any, single_name: str, names: Sequence[str] = ()) -> list[str]:
    """Returns a name for each tensor of a structure, in the order of tf.nest.

    A key of a dict is a name, and so is the index in a list after `single_name`, which is also the
    name of a tensor alone.

    Args:
      structure: The tensors or specs.
      single_name: The name of a tensor alone.
      names: The names that the model has for a tensor alone or for the items of a list.
    """
    if not isinstance(structure, (Mapping, list, tuple)) and len(names) == 1:
        return [names[0]]
    if isinstance(structure, (list, tuple)) and len(names) == len(structure):
        structure = dict(zip(names, structure, strict=True))
        # tf.nest sorts the keys of a dict, and keeps the order of a list.
        return [name for name, part in structure.items() for _ in tf.nest.flatten(part)]

    paths = []
    for path in _list_paths(structure):
        parts = [str(part) for part in path]
        if not parts or parts[0].isdigit():
            parts.insert(0, single_name)
        paths.append(_clean_name("_".join(parts)))
    if len(set(paths)) < len(paths):
        raise UsageError(f"two tensors would have one name: {', '.join(paths)}; rename the keys")
    return paths


def _list_paths(structure: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of each leaf, in the order of tf.nest, which sorts the keys of dicts."""
    if isinstance(structure, Mapping):
        items = [(key, structure[key]) for key in sorted(structure)]
    elif isinstance(structure, (list, tuple)):
        items = list(enumerate(structure))
    else:
        return [path]
    return [leaf for key, part in items for leaf in _list_paths(part, (*path, key))]


def _clean_name(name: str) -> str:
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _open_batch(name: str, spec: Any) -> tf.TensorSpec:
    """Returns the spec of an input for batches of any size."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        raise UsageError(
            f"the input {name!r} is {spec}; an export takes dense tensors whose first dimension is"
            " the batch"
        )
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype, name)
