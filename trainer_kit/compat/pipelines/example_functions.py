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


def apply_preprocessing(
    records: tf.data.Dataset, function: Callable[..., object]
) -> tf.data.Dataset:
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

    def preprocess(record: tf.Tensor) -> Any:
        return apply_autograph(function)(example=record)

    return _map_examples(records, preprocess, label)


def apply_augmentation(
    examples: tf.data.Dataset, function: Callable[..., object]
) -> tf.data.Dataset:
    """Returns `examples` with `function` called for the parts of each.

    A function that needs one argument of several parts, such as a Keras layer, gets the first one,
    and the others stay. Runs eagerly, on the host. The function runs in graph.

    Raises:
      UsageError: When the function cannot be called so.
    """
    label = f"data_augmentation {describe_function(function)}"
    spec = examples.element_spec
    parts = len(spec) if isinstance(spec, tuple) else 1
    required = _count_required_arguments(function)

    def augment_all(*example: Any) -> Any:
        return apply_autograph(function)(*example)

    def augment_first(first: Any, *others: Any) -> tuple[Any, ...]:
        return (apply_autograph(function)(first), *others)

    if required is None or required == parts:
        return _map_examples(examples, augment_all, label)
    if required == 1:
        return _map_examples(examples, augment_first, label)

    plural = "s" if parts > 1 else ""
    raise UsageError(
        f"{label}: it needs {required} arguments, but preprocessing returns {parts}"
        f" part{plural}; let it take all parts, or the first one alone"
    )


def _map_examples(
    dataset: tf.data.Dataset, call: Callable[..., object], label: str
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
    method = function.call if is_layer else function
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise UsageError(f"data_augmentation: {error}") from error

    count = 0
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        is_positional = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if is_positional and parameter.default is parameter.empty:
            count += 1
    return count
