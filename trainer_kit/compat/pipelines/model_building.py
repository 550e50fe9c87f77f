"""Builds and compiles the model of a job in a strategy, from the arguments of Training."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.compat.keras.step_preparation import is_overridden
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.runtime.keras_internals import get_compile_arguments, is_keras_2_model
from trainer_kit.runtime.strategy import create_strategy
from trainer_kit.runtime.strategy_choice import TPU_ENV_VARS
from trainer_kit.runtime.tensorflow_internals import has_global_seed
from trainer_kit.training.task import is_compiled

_LOG = logging.getLogger(__name__)


def job_strategy(use_tpu: bool) -> tf.distribute.Strategy:
    """Returns a TPUStrategy, or the current strategy, which is TensorFlow's default one outside of a scope.

    Runs eagerly, on the host.

    Args:
      use_tpu: Whether to look for a TPU.

    Raises:
      ConfigError: when an environment variable names a TPU and it does not answer: a job that
        should run on it would take days on a CPU.
    """
    current = tf.distribute.get_strategy()
    if not use_tpu or tf.distribute.has_strategy():
        return current
    try:
        return create_strategy(RuntimeConfig(distribution_strategy="tpu"))
    except ConfigError:
        if any(os.environ.get(name) for name in TPU_ENV_VARS):
            raise
    _LOG.warning("use_tpu=True: there is no TPU; the job trains with TensorFlow's default strategy")
    return current


def build_model(
    build_model_func: Callable[..., Any],
    custom_model_class: type | None = None,
    *,
    optimizer: Any = None,
    loss: Any = None,
    metrics: Any = None,
) -> Any:
    """Returns the model of a job, compiled if the arguments of Training or build_model_func say how.

    Runs eagerly, in the scope of the job's strategy.

    Raises:
      UsageError: when the function returns no model, or a model that the custom class cannot take.
    """
    seed_keras()
    built = _call(build_model_func)
    if not isinstance(built, keras.Model) and not is_keras_2_model(built):
        raise UsageError(
            f"build_model_func returned a {type(built).__name__}; it has to return a model of Keras"
        )
    model = _wrap_in_custom_class(built, custom_model_class)
    _compile(model, built, {"optimizer": optimizer, "loss": loss, "metrics": metrics})
    return model


def seed_keras() -> None:
    """Seeds Keras with the seed of `tf.random.set_seed`, if the program has called it. Runs eagerly, on the host.

    Keras 2 took its initial weights from this seed. Keras 3 draws them from Python's random
    numbers, which go on from the seed afterwards; those of NumPy stay as they are.
    """
    if not has_global_seed():
        return
    numpy = np.random.get_state()
    seed_everything(tf.compat.v1.get_seed(0)[0])
    np.random.set_state(numpy)


@contextlib.contextmanager
def use_custom_objects(custom_objects: Mapping[str, Any] | None) -> Iterator[None]:
    """A context in which Keras 3 and tf_keras find objects by name, for `load_model` and `compile`."""
    with contextlib.ExitStack() as stack:
        for library in (keras, sys.modules.get("tf_keras")):
            if custom_objects and library is not None:
                stack.enter_context(library.utils.custom_object_scope(dict(custom_objects)))
        yield


def get_input_size(model: Any) -> Any:
    """Returns the height of the images that a model takes; (height, width) if they differ; of vectors their length.

    Raises:
      UsageError: when the model takes inputs of any size, or does not tell the size.
    """
    inputs = getattr(model, "inputs", None) or ()
    shapes = [tuple(tensor.shape) for tensor in inputs]
    shape = next((shape for shape in shapes if len(shape) == 4), shapes[0] if shapes else ())
    channels_first = len(shape) == 4 and keras.config.image_data_format() == "channels_first"
    sizes = shape[2:] if channels_first else shape[1:3] if len(shape) == 4 else shape[1:2]
    if not sizes or None in sizes:
        raise UsageError(
            f"the model {model.name!r} does not tell the size of its inputs; give input_shape a"
            " size"
        )
    return sizes[0] if len(set(sizes)) == 1 else tuple(sizes)


def _call(build_model_func: Callable[..., Any]) -> Any:
    """Calls the function; an argument `checkpoint` gets no checkpoint, since the engine restores it."""
    try:
        signature = inspect.signature(build_model_func)
        checkpoint = signature.parameters.get("checkpoint")
        arguments = (
            {"checkpoint": None}
            if checkpoint is not None and checkpoint.default is checkpoint.empty
            else {}
        )
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"build_model_func: {error}; give a function that is called without arguments: bind"
            " them, such as functools.partial(build_model, num_classes=10)"
        ) from None
    return build_model_func(**arguments)


def _wrap_in_custom_class(model: Any, custom_model_class: type | None) -> Any:
    """Returns the model as one of the custom class, with the same layers."""
    if custom_model_class is None or isinstance(model, custom_model_class):
        return model
    try:
        if isinstance(
            model, keras.Sequential
        ):  # its property `input` is that of a layer, which was not called
            ends = model.inputs[0], model.outputs[0]
        else:
            ends = model.input, model.output
    except (AttributeError, ValueError, TypeError):
        name = custom_model_class.__name__
        raise UsageError(
            f"custom_model_class={name} is made as {name}(inputs, outputs), and the model"
            f" {model.name!r} has no inputs and outputs of its own; return a functional model, or a"
            f" Sequential with an Input, or a {name} from build_model_func"
        ) from None
    return custom_model_class(*ends)


def _compile(model: Any, built_model: Any, arguments: dict[str, Any]) -> None:
    """Compiles the model with the arguments of Training, and where they are None as build_model_func has done.

    Args:
      model: The model that is trained.
      built_model: The model that build_model_func returned, which may be the same one.
      arguments: The optimizer, the loss and the metrics of Training.
    """
    changes = {name: value for name, value in arguments.items() if value is not None}
    if not changes and (model is built_model or is_compiled(model)):
        return
    if is_compiled(built_model):
        before = get_compile_arguments(built_model)
        if is_overridden(
            model, "compile"
        ):  # it need not know the other arguments, nor what is not given
            before = {
                name: before[name] for name in ("optimizer", "loss") if before.get(name) is not None
            }
        changes = {**before, **changes}
    if changes:
        model.compile(**changes)
