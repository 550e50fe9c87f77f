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
from trainer_kit.typing import Optimizer

_LOG = logging.getLogger(__name__)


def job_strategy(use_tpu: bool) -> tf.distribute.Strategy:
    """Returns a TPUStrategy, or else the current strategy.

    Outside of a scope the current strategy is TensorFlow's default one. Runs eagerly, on the host.

    Args:
      use_tpu: Whether to look for a TPU.

    Raises:
      ConfigError: When an environment variable names a TPU and it does not answer. A job that
        should run on it would take days on a CPU.
    """
    current_strategy = tf.distribute.get_strategy()
    if not use_tpu or tf.distribute.has_strategy():
        return current_strategy

    try:
        return create_strategy(RuntimeConfig(distribution_strategy="tpu"))
    except ConfigError:
        if any(os.environ.get(name) for name in TPU_ENV_VARS):
            raise
    _LOG.warning("use_tpu=True: there is no TPU; the job trains with TensorFlow's default strategy")
    return current_strategy


def build_model(
    build_model_func: Callable[..., keras.Model | tf.keras.Model],
    custom_model_class: type | None = None,
    *,
    optimizer: Optimizer | str | None = None,
    loss: Any = None,
    metrics: Any = None,
) -> keras.Model | tf.keras.Model:
    """Returns the model of a job.

    It is compiled if the arguments of Training or build_model_func say how. Runs eagerly, in the
    scope of the job's strategy.

    Args:
      build_model_func, custom_model_class, optimizer, loss, metrics: See Training.

    Raises:
      UsageError: When the function returns no model, or a model that the custom class cannot take.
    """
    seed_keras()
    built_model = _call(build_model_func)
    if not isinstance(built_model, keras.Model) and not is_keras_2_model(built_model):
        raise UsageError(
            f"build_model_func returned a {type(built_model).__name__}; it has to return a model of"
            " Keras"
        )

    # The model that is trained is of the custom class, with the same layers.
    model = built_model
    if custom_model_class is not None and not isinstance(model, custom_model_class):
        try:
            # The property `input` of a Sequential is that of a layer, which was not called.
            if isinstance(model, keras.Sequential):
                ends = (model.inputs[0], model.outputs[0])
            else:
                ends = (model.input, model.output)
        except (AttributeError, ValueError, TypeError):
            name = custom_model_class.__name__
            raise UsageError(
                f"custom_model_class={name} is made as {name}(inputs, outputs), and the model"
                f" {model.name!r} has no inputs and outputs of its own; return a functional model,"
                f" or a Sequential with an Input, or a {name} from build_model_func"
            ) from None
        model = custom_model_class(*ends)

    arguments = {"optimizer": optimizer, "loss": loss, "metrics": metrics}
    _compile(model, built_model, arguments)
    return model


def seed_keras() -> None:
    """Seeds Keras with the seed of `tf.random.set_seed`, if the program has called it.

    Keras 2 took its initial weights from this seed. Keras 3 draws them from Python's random
    numbers, which continue from the seed afterwards. Those of NumPy stay as they are. Runs eagerly,
    on the host.
    """
    if not has_global_seed():
        return

    numpy_state = np.random.get_state()
    # Of an operation's two seeds, the first one is that of the program.
    global_seed, _ = tf.compat.v1.get_seed(0)
    seed_everything(global_seed)
    np.random.set_state(numpy_state)


@contextlib.contextmanager
def use_custom_objects(custom_objects: Mapping[str, object] | None) -> Iterator[None]:
    """A context in which Keras 3 and tf_keras find objects by name.

    It is for `load_model` and `compile`.
    """
    with contextlib.ExitStack() as stack:
        # A program that has not imported tf_keras has no models of it.
        for library in (keras, sys.modules.get("tf_keras")):
            if custom_objects and library is not None:
                stack.enter_context(library.utils.custom_object_scope(dict(custom_objects)))
        yield


def get_input_size(model: keras.Model | tf.keras.Model) -> int | tuple[int, ...]:
    """Returns the height of the images that a model takes.

    It is (height, width) if they differ. For a model of vectors it is their length.

    Raises:
      UsageError: When the model takes inputs of any size, or does not tell the size.
    """
    inputs = getattr(model, "inputs", None) or ()
    shapes = [tuple(tensor.shape) for tensor in inputs]

    # A model may take other inputs beside its images.
    image_shapes = [shape for shape in shapes if len(shape) == 4]
    has_images = bool(image_shapes)
    shape: tuple[Any, ...] = ()
    if has_images:
        shape = image_shapes[0]
    elif shapes:
        shape = shapes[0]

    if has_images and keras.config.image_data_format() == "channels_first":
        sizes = shape[2:]
    elif has_images:
        sizes = shape[1:3]
    else:
        sizes = shape[1:2]
    if not sizes or None in sizes:
        raise UsageError(
            f"the model {model.name!r} does not tell the size of its inputs; give input_shape a"
            " size"
        )

    is_square = len(set(sizes)) == 1
    if is_square:
        return sizes[0]
    return tuple(sizes)


def _call(
    build_model_func: Callable[..., keras.Model | tf.keras.Model],
) -> keras.Model | tf.keras.Model:
    """Calls the function.

    An argument `checkpoint` gets no checkpoint, since the engine restores it.
    """
    try:
        signature = inspect.signature(build_model_func)
        parameter = signature.parameters.get("checkpoint")
        is_required = parameter is not None and parameter.default is parameter.empty
        arguments = {"checkpoint": None} if is_required else {}
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"build_model_func: {error}; give a function that is called without arguments: bind"
            " them, such as functools.partial(build_model, num_classes=10)"
        ) from None
    return build_model_func(**arguments)


def _compile(
    model: keras.Model | tf.keras.Model,
    built_model: keras.Model | tf.keras.Model,
    arguments: dict[str, object],
) -> None:
    """Compiles the model with the arguments of Training.

    Where they are None, it is compiled as build_model_func has done.

    Args:
      model: The model that is trained.
      built_model: The model that build_model_func returned, which may be the same one.
      arguments: The optimizer, the loss and the metrics of Training.
    """
    changes = {name: value for name, value in arguments.items() if value is not None}
    if not changes and (model is built_model or is_compiled(model)):
        return

    if is_compiled(built_model):
        compile_arguments = get_compile_arguments(built_model)
        # A method of the user may lack the other arguments, and need not take None.
        if is_overridden(model, "compile"):
            compile_arguments = {
                name: compile_arguments[name]
                for name in ("optimizer", "loss")
                if compile_arguments.get(name) is not None
            }
        changes = {**compile_arguments, **changes}
    if changes:
        model.compile(**changes)
