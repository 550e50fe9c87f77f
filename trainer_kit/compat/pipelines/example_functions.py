"""Users' functions of one example, as `get_tfrecord_dataset` calls them in the maps of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.dataset_resume import examine
from trainer_kit.inputs.sources.batch_function import name_and_place


def preprocessed(records: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `records` with `function(example=record)` called for each. Runs eagerly; the function runs in graph.

    Raises:
      UsageError: when the function cannot be called so.
    """
    label = f"preprocessing {name_and_place(function)}"
    try:
        inspect.signature(function).bind(example=None)
    except (TypeError, ValueError) as error:  # a ValueError for a partial with an unknown keyword
        raise UsageError(
            f"{label}: {error}. It is called as preprocessing(example=record): write `def"
            " read_tfrecord(example, size):` and bind all other parameters,"
            " `functools.partial(read_tfrecord, size=112)`"
        ) from error
    return _mapped(records, lambda record: converted(function)(example=record), label)


def augmented(examples: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `examples` with `function` called for the parts of each. Runs eagerly; the function runs in graph.

    A function that needs one argument of several parts, such as a Keras layer, gets the first one,
    and the others stay.

    Raises:
      UsageError: when the function cannot be called so.
    """
    label = f"data_augmentation {name_and_place(function)}"
    parts = len(examples.element_spec) if isinstance(examples.element_spec, tuple) else 1
    needed = _needed_arguments(function)
    if needed is None or needed == parts:
        return _mapped(examples, lambda *example: converted(function)(*example), label)
    if needed == 1:
        return _mapped(
            examples, lambda first, *others: (converted(function)(first), *others), label
        )
    raise UsageError(
        f"{label}: it needs {needed} arguments, but preprocessing returns {parts}"
        f" part{'s' * (parts > 1)}; let it take all parts, or the first one alone"
    )


def _mapped(dataset: tf.data.Dataset, call: Callable[..., Any], label: str) -> tf.data.Dataset:
    """Returns `dataset` with a function applied to each element, in order.

    Examples go through in parallel, unless the function has a state, such as that of stateful
    random ops: their numbers would come in another order in each run.
    """
    call = tf.autograph.experimental.do_not_convert(call)
    mapped = dataset.map(call)
    mapped.label = label  # for the engine's warnings about what cannot be resumed
    operations = examine(mapped)
    stateful = (*operations.random_ops, *operations.python, *operations.state)
    if not any(text.startswith(f"{label}:") for text in stateful):
        mapped = dataset.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        mapped.label = label
    return mapped


def _needed_arguments(function: Any) -> int | None:
    """Returns how many positional arguments a function needs, and of a Keras layer its `call`; None if it takes any.

    Raises:
      UsageError: for what is no function.
    """
    is_layer = hasattr(function, "get_config") and hasattr(function, "call")
    try:
        parameters = inspect.signature(function.call if is_layer else function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(f"data_augmentation: {error}") from error
    kinds = [parameter.kind for parameter in parameters if parameter.default is parameter.empty]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for kind in kinds
    )
