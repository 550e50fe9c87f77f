"""Builds and compiles the model of a job, from the arguments of Training."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.compat.keras.preparation import is_overridden
from trainer_kit.distribution.keras_internals import compile_arguments, of_keras_2
from trainer_kit.distribution.seeds import seed_everything
from trainer_kit.distribution.tensorflow_internals import has_global_seed
from trainer_kit.errors import UsageError
from trainer_kit.serving.load import check_built
from trainer_kit.training.task import is_compiled


@dataclass(frozen=True)
class ModelParts:
    """The arguments of Training that make its model; see there."""

    build_model_func: Callable[..., Any]
    custom_model_class: type | None
    custom_objects: Mapping[str, Any] | None
    optimizer: Any
    loss: Any
    metrics: Any


def build_model(parts: ModelParts) -> Any:
    """Returns the model of a job, compiled if the arguments say how. Runs eagerly, in the scope of the job's strategy.

    Raises:
      UsageError: when the function returns no model, or a model that the custom class cannot take.
    """
    seed_keras()
    with custom_objects_known(parts.custom_objects):
        made = _checked(_call(parts.build_model_func))
        model = _wrapped(made, parts.custom_model_class)
        _compile(model, made, parts)
    return model


def seed_keras() -> None:
    """Seeds Keras with the seed of `tf.random.set_seed`, if the program has called it. Runs eagerly, on the host.

    Keras 2 took its initial weights from this seed. Keras 3 draws them from Python's random numbers, which go on from
    the seed afterwards; those of NumPy stay as they are.
    """
    if not has_global_seed():
        return
    numpy = np.random.get_state()
    seed_everything(tf.compat.v1.get_seed(0)[0])
    np.random.set_state(numpy)


@contextlib.contextmanager
def custom_objects_known(custom_objects: Mapping[str, Any] | None) -> Iterator[None]:
    """A context in which Keras 3 and tf_keras find objects by name, for `load_model` and `compile`."""
    with contextlib.ExitStack() as stack:
        for library in (keras, sys.modules.get("tf_keras")):
            if custom_objects and library is not None:
                stack.enter_context(library.utils.custom_object_scope(dict(custom_objects)))
        yield


def input_size(model: Any) -> Any:
    """Returns the height of the images that a model takes; (height, width) if they differ; of vectors their length.

    Raises:
      UsageError: when the model takes inputs of any size, or does not tell the size.
    """
    shape = _first_shape(getattr(model, "input_shape", None)) if hasattr(model, "input_shape") else ()
    channels_first = len(shape) == 4 and keras.config.image_data_format() == "channels_first"
    sizes = shape[2:] if channels_first else shape[1:3] if len(shape) == 4 else shape[1:2]
    if not sizes or None in sizes:
        raise UsageError(f"the model {model.name!r} does not tell the size of its inputs; give input_shape a size")
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def build_on(model: Any, data: Any) -> bool:
    """Builds a model on a batch of a dataset if it is not built; returns whether all its layers have weights then.

    Runs eagerly, on the host.
    """
    if not _is_built(model) and isinstance(data, tf.data.Dataset) and is_overridden(model, "call"):
        with model.distribute_strategy.scope():
            model(keras.utils.unpack_x_y_sample_weight(next(iter(data.take(1))))[0])
    return _is_built(model)


def _call(build_model_func: Callable[..., Any]) -> Any:
    """Calls the function; an argument `checkpoint` gets no checkpoint, since the engine restores it."""
    if not callable(build_model_func):
        raise UsageError(f"build_model_func is {build_model_func!r:.60}; give a function that returns a model")
    signature = inspect.signature(build_model_func)
    asked = signature.parameters.get("checkpoint")
    requires = asked is not None and asked.default is asked.empty and asked.kind is not asked.VAR_KEYWORD
    given = {"checkpoint": None} if requires else {}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise UsageError(
            f"build_model_func: {error}; it is called without arguments: bind them, such as "
            "functools.partial(build_model, num_classes=10)"
        ) from None
    return build_model_func(**given)


def _checked(model: Any) -> Any:
    if isinstance(model, keras.Model) or of_keras_2(model):
        return model
    raise UsageError(f"build_model_func returned a {type(model).__name__}; it has to return a model of Keras")


def _wrapped(model: Any, custom_model_class: type | None) -> Any:
    """Returns the model as one of the custom class, with the same layers."""
    if custom_model_class is None or isinstance(model, custom_model_class):
        return model
    ends = _inputs_and_outputs(model)
    if ends is None:
        name = custom_model_class.__name__
        raise UsageError(
            f"custom_model_class={name} is made as {name}(inputs, outputs), and the model {model.name!r} has no inputs "
            f"and outputs of its own; return a functional model, or a Sequential with an Input, or a {name} from "
            "build_model_func"
        )
    return custom_model_class(*ends)


def _inputs_and_outputs(model: Any) -> tuple[Any, Any] | None:
    """Returns the tensors that a functional or Sequential model was made of; None for any other model."""
    try:
        if isinstance(model, keras.Sequential):  # its property `input` is that of a layer, which was not called
            return model.inputs[0], model.outputs[0]
        return model.input, model.output
    except (AttributeError, ValueError, TypeError):
        return None


def _compile(model: Any, made: Any, parts: ModelParts) -> None:
    """Compiles the model with the arguments of Training, and where they are missing as build_model_func has done."""
    given = {"optimizer": parts.optimizer, "loss": parts.loss, "metrics": parts.metrics}
    if all(value is None for value in given.values()) and (model is made or is_compiled(model)):
        return
    if is_compiled(made):
        known = compile_arguments(made)
        if is_overridden(model, "compile"):  # it need not know the other arguments, nor what is not given
            known = {name: known.get(name) for name in ("optimizer", "loss")}
        given |= {name: value for name, value in known.items() if given.get(name) is None}
    if given := {name: value for name, value in given.items() if value is not None}:
        model.compile(**given)


def _first_shape(shapes: Any) -> tuple[int | None, ...]:
    """Returns the shape of the first input of a model with one or several inputs."""
    while isinstance(shapes, Mapping) or (shapes and isinstance(shapes[0], (tuple, list))):
        shapes = next(iter(shapes.values())) if isinstance(shapes, Mapping) else shapes[0]
    return tuple(shapes or ())


def _is_built(model: Any) -> bool:
    try:
        check_built(model)
    except UsageError:
        return False
    return True
