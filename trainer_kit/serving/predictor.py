"""get_predictor: a function from named inputs of a model to named tensors inside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.serving.model_loading import check_built, load_model
from trainer_kit.training.step_tensors import LayerOutputs, unknown_tensor
from trainer_kit.typing import Model

Predictor = Callable[..., dict[str, np.ndarray]]


def get_predictor(
    model: Model | str | os.PathLike[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    which: str | int = "best",
    import_modules: str | Sequence[str] | Literal[False] = (),
) -> Predictor:
    """Returns a function that computes tensors of a model, in inference mode.

    Runs eagerly, on the host.

    The function takes the values of the inputs, in their order or by name, and returns the outputs
    as NumPy arrays by name. It computes only what the outputs need. A live model is used with the
    weights that it has at each call. For their moving average, call the function inside
    `trainer.use_weights()`.

    Args:
      model: A built Keras 3 model, tf_keras model or tf.Module, which is called with
        training=False. Or the folder of a run.
      inputs: The names of the inputs. A functional model has names for its inputs. Of any other
        model several inputs are the keys of the dict that it takes, and a single one may have any
        name.
      outputs: The names of tensors: those of `trainer_kit.expose`, of layers, of the model itself,
        and the keys of the dict that it returns.
      which, import_modules: The checkpoint of a run, and the modules to import. See `load_model`.
        Ignored for a live model.

    Raises:
      UsageError: when an input or the run is not known. At the first call, when an output is not
        known.
      StorageError: when the checkpoint is damaged.
    """
    for field, names in (("inputs", inputs), ("outputs", outputs)):
        if isinstance(names, str) or not names:
            raise UsageError(
                f"get_predictor: {field} is {names!r}; give a list of names, such as"
                f" {[names or 'name']}"
            )
    live_model: Any = model
    if isinstance(model, (str, os.PathLike)):
        live_model = load_model(model, which, import_modules)

    check_built(live_model)
    input_names = _name_inputs(live_model, list(inputs))
    layers = LayerOutputs(live_model)

    @tf.function(reduce_retracing=True, autograph=False)
    def compute_tensors(values: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        converted_model = apply_autograph(live_model)
        with layers.collect(outputs) as collected:
            argument = tf.nest.map_structure(values.get, input_names)
            returned = converted_model(argument, training=False)
        if not isinstance(returned, Mapping):
            model_name = getattr(live_model, "name", "")
            returned = {model_name: returned}

        tensors = {**returned, **collected.tensors}
        for name in outputs:
            if name not in tensors:
                names = {*tensors, *collected.exposed_names, *layers.names}
                raise unknown_tensor(name, names, "get_predictor: the model")
        return {name: tensors[name] for name in outputs}

    def predict(*positional: Any, **named: Any) -> dict[str, np.ndarray]:
        positional_values = dict(zip(inputs, positional, strict=False))
        values = {**positional_values, **named}
        # A name that is also a position, or one value too many, changes the count.
        count = len(positional) + len(named)
        if count != len(inputs) or values.keys() != set(inputs):
            positional_texts = ["..."] * len(positional)
            named_texts = [f"{name}=..." for name in named]
            call = ", ".join([*positional_texts, *named_texts])
            raise UsageError(
                f"the predictor takes the inputs ({', '.join(inputs)}); it was called with ({call})"
            )

        arguments = {}
        for name, value in values.items():
            arguments[name] = tf.convert_to_tensor(value)
        tensors = compute_tensors(arguments)
        arrays: dict[str, np.ndarray] = tf.nest.map_structure(np.asarray, tensors)
        return arrays

    return predict


def _name_inputs(model: Model, names: Sequence[str]) -> Any:
    """Returns the argument of the model's call with the name of each input in place of its value.

    Raises:
      UsageError: when the names are not those of the inputs of a functional model.
    """
    # Only a functional model has names for its inputs.
    structure = None
    if getattr(model, "inputs", None):
        structure = getattr(model, "input", None)
    if isinstance(structure, Mapping):
        input_names: Any = {key: key for key in structure}
    elif structure is not None:
        tensor_names = []
        for tensor in tf.nest.flatten(structure):
            name, _, _ = tensor.name.partition(":")
            tensor_names.append(name)
        input_names = tf.nest.pack_sequence_as(structure, tensor_names)
    elif len(names) > 1:
        input_names = {name: name for name in names}
    else:
        input_names = names[0]

    expected = tf.nest.flatten(input_names)
    if len(expected) == len(names) == 1:
        # A single input may have any name.
        return tf.nest.pack_sequence_as(input_names, names)
    for name in names:
        if name not in expected:
            advice = suggest_names(name, expected)
            raise UsageError(f"get_predictor: the model has no input {name!r}; {advice}")
    missing = [name for name in expected if name not in names]
    if missing:
        raise UsageError(
            f"get_predictor: the model also needs the inputs {', '.join(missing)}; name them in"
            " inputs"
        )
    return input_names
