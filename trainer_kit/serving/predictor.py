"""get_predictor: a function from named inputs of a model to named tensors inside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
    which: str | int | None = None,
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
        training=False. Or the path of a run's folder or of a checkpoint in it.
      inputs: The names of the inputs. A functional model has names for its inputs. Of any other
        model several inputs are the keys of the dict that it takes, and a single one may have any
        name.
      outputs: The names of tensors: those of `trainer_kit.expose`, of layers, of the model itself,
        and the keys of the dict that it returns.
      which: The checkpoint of a run's folder; see `load_model`. None: "best".
      import_modules: The modules to import before the experiment of a run is looked up, or one:
        dotted names or paths of .py files. Empty: those of its command, seen from the working
        directory.

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
    live_model: Model
    if isinstance(model, (str, os.PathLike)):
        live_model = _load_run_model(Path(model), which, import_modules)
    elif which is None:
        live_model = model
    else:
        raise UsageError(
            f"get_predictor: which={which!r} is for the folder of a run; leave it out for a live"
            " model"
        )

    check_built(live_model)
    build_argument = _make_argument_builder(live_model, list(inputs))
    layers = LayerOutputs(live_model)

    @tf.function(reduce_retracing=True, autograph=False)
    def compute_tensors(values: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        converted_model = apply_autograph(live_model)
        with layers.collect(outputs) as collected:
            argument = build_argument(values)
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
            texts = ["..."] * len(positional) + [f"{name}=..." for name in named]
            call = ", ".join(texts)
            raise UsageError(
                f"the predictor takes the inputs ({', '.join(inputs)}); it was called with ({call})"
            )

        arguments = {name: tf.convert_to_tensor(value) for name, value in values.items()}
        tensors = compute_tensors(arguments)
        arrays: dict[str, np.ndarray] = tf.nest.map_structure(np.asarray, tensors)
        return arrays

    return predict


def _load_run_model(
    path: Path, which: str | int | None, import_modules: str | Sequence[str] | Literal[False]
) -> Any:
    """Returns the model of a run's folder, or of a checkpoint in it."""
    if (path / "params.yaml").is_file():
        checkpoint = "best" if which is None else which
        return load_model(path, checkpoint, import_modules)

    folders = [parent for parent in path.parents if (parent / "params.yaml").is_file()]
    if not folders:
        # The error message of load_model says what the path is.
        return load_model(path)
    if which is not None:
        raise UsageError(
            f"get_predictor: {path} is a checkpoint; which={which!r} is for the folder of a run"
        )
    # The nearest folder comes first.
    run_dir = folders[0]
    return load_model(run_dir, os.fspath(path), import_modules)


def _make_argument_builder(
    model: Model, names: list[str]
) -> Callable[[Mapping[str, tf.Tensor]], Any]:
    """Returns a function that builds the argument of the model's call from values by name."""
    # Only a functional model has names for its inputs.
    structure = None
    if getattr(model, "inputs", None):
        structure = getattr(model, "input", None)
    if structure is None:
        if len(names) > 1:
            return dict
        single_name = names[0]
        return lambda values: values[single_name]

    # The keys of a dict are the names, or else those of the symbolic tensors.
    if isinstance(structure, Mapping):
        nested_names = {key: key for key in structure}
    else:
        nested_names = tf.nest.map_structure(
            lambda tensor: tensor.name.partition(":")[0], structure
        )
    input_names = tf.nest.flatten(nested_names)

    # A single input may have any name.
    if len(input_names) == len(names) == 1:
        input_names = names

    for name in names:
        if name not in input_names:
            advice = suggest_names(name, input_names)
            raise UsageError(f"get_predictor: the model has no input {name!r}; {advice}")
    missing = [name for name in input_names if name not in names]
    if missing:
        missing_names = ", ".join(missing)
        raise UsageError(
            f"get_predictor: the model also needs the inputs {missing_names}; name them in inputs"
        )
    return lambda values: tf.nest.pack_sequence_as(
        nested_names, [values[name] for name in input_names]
    )
