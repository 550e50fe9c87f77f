"""Functions of one example, which `get_tfrecord_dataset` calls in the maps of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.dataset_resume import examine_dataset
from trainer_kit.inputs.sources.batch_function import describe_function


def apply_preprocessing(records: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `records` with `function(example=record)` called for each.

    Runs eagerly, on the host. The function runs in graph.

    Raises:
      UsageError: When the function cannot be called so.
    """
    label = f"preprocessing {describe_function(function)}"
    # A partial with an unknown keyword raises a ValueError.
    try:
        inspect.signature(function).bind(example=None)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{label}: {error}. It is called as preprocessing(example=record): write `def"
            " read_tfrecord(example, size):` and bind all other parameters,"
            " `functools.partial(read_tfrecord, size=112)`"
        ) from error
    return _map_examples(records, lambda record: apply_autograph(function)(example=record), label)


def apply_augmentation(examples: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `examples` with `function` called for the parts of each.

    A function that needs one argument of several parts, such as a Keras layer, gets the first one,
    and the others stay. Runs eagerly, on the host. The function runs in graph.

    Raises:
      UsageError: When the function cannot be called so.
    """
    label = f"data_augmentation {describe_function(function)}"
    parts = len(examples.element_spec) if isinstance(examples.element_spec, tuple) else 1
    required = _count_required_arguments(function)
    if required is None or required == parts:
        return _map_examples(examples, lambda *example: apply_autograph(function)(*example), label)
    if required == 1:
        return _map_examples(
            examples, lambda first, *others: (apply_autograph(function)(first), *others), label
        )
    raise UsageError(
        f"{label}: it needs {required} arguments, but preprocessing returns {parts}"
        f" part{'s' * (parts > 1)}; let it take all parts, or the first one alone"
    )


def _map_examples(
    dataset: tf.data.Dataset, call: Callable[..., Any], label: str
) -> tf.data.Dataset:
    """Returns `dataset` with a function applied to each element, in order.

    Examples go through in parallel, unless the function has a state, such as that of stateful
    random ops: their numbers would come in another order in each run.
    """
    call = tf.autograph.experimental.do_not_convert(call)
    mapped = dataset.map(call)
    # The engine's warnings about what cannot be resumed contain the label.
    mapped.label = label

    structure = examine_dataset(mapped)
    stateful_parts = (
        *structure.random_ops,
        *structure.python_functions,
        *structure.stateful_ops,
    )
    if not any(text.startswith(f"{label}:") for text in stateful_parts):
        mapped = dataset.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        mapped.label = label
    return mapped


def _count_required_arguments(function: Any) -> int | None:
    """Returns how many positional arguments a function needs. None if it takes any number.

    For a Keras layer it is the number of those of its `call`.

    Raises:
      UsageError: For what is no function.
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
