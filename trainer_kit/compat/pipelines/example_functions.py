"""Users' functions of one example, as `get_tfrecord_dataset` calls them in the maps of a dataset."""

from __future__ import annotations

import inspect
import logging
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import functions_of
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.dataset_resume import examine
from trainer_kit.inputs.sources.batch_function import name_and_place
from trainer_kit.inputs.stateful_ops import nodes

_LOG = logging.getLogger(__name__)
_TRACED = (
    "%s draws numbers from np.random, random or the clock, which Python does once, while TensorFlow makes the graph: "
    "each example then gets the same numbers. Use ops such as tf.random.uniform or tf.random.stateless_uniform instead"
)


def preprocessed(records: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `records` with `function(example=record)` called for each. Runs eagerly; the function runs in graph.

    Raises:
      UsageError: when the function cannot be called so.
    """
    label = f"preprocessing {name_and_place(function)}"
    if problem := _not_callable_with_example(function):
        raise UsageError(
            f"{label}: {problem}. It is called as preprocessing(example=record): write `def read_tfrecord(example, "
            "size):` and bind all other parameters, `functools.partial(read_tfrecord, size=112)`"
        )
    return _mapped(records, lambda record: converted(function)(example=record), label)


def augmented(examples: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns `examples` with `function` called for the parts of each. Runs eagerly; the function runs in graph.

    A function that needs one argument of several parts, such as a Keras layer, gets the first one, and the others stay.

    Raises:
      UsageError: when the function cannot be called so.
    """
    label = f"data_augmentation {name_and_place(function)}"
    parts = len(examples.element_spec) if isinstance(examples.element_spec, tuple) else 1
    needed = _needed_arguments(function)
    if needed is None or needed == parts:
        return _mapped(examples, lambda *given: converted(function)(*given), label)
    if needed == 1:
        return _mapped(examples, lambda first, *others: (converted(function)(first), *others), label)
    raise UsageError(
        f"{label}: it needs {needed} arguments, but preprocessing returns {parts} part{'s' * (parts > 1)}; let it take "
        "all parts, or the first one alone"
    )


def _mapped(dataset: tf.data.Dataset, call: Callable[..., Any], label: str) -> tf.data.Dataset:
    """Returns `dataset` with a function applied to each element, in order; warns of numbers that Python draws.

    The function is traced twice, since numbers that Python draws are constants of the graph: two graphs then differ.
    What differs by no trace is not seen, such as a generator that the function makes from a fixed seed.
    Examples go through in parallel, unless the function has a state, such as that of stateful random ops: their numbers
    would come in another order in each run.
    """
    call = tf.autograph.experimental.do_not_convert(call)
    before = _random_states()
    one_by_one = dataset.map(call)
    after = _random_states()
    in_parallel = dataset.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    random.setstate(after[0])
    np.random.set_state(after[1])
    one_by_one.label = in_parallel.label = label  # for the engine's warnings about what cannot be resumed
    if pickle.dumps(before) != pickle.dumps(after) or _graph(one_by_one) != _graph(in_parallel):
        _LOG.warning(_TRACED, label)
    found = examine(one_by_one)
    keeps_state = any(text.startswith(f"{label}:") for text in (*found.random_ops, *found.python, *found.state))
    return one_by_one if keeps_state else in_parallel


def _random_states() -> tuple[Any, Any]:
    """Returns the states of Python's and NumPy's global random numbers."""
    return random.getstate(), np.random.get_state()


def _graph(dataset: tf.data.Dataset) -> list[tuple[str, bytes]]:
    """Returns the ops of a map's function and the values of constants; each trace has other names."""
    return sorted(
        (node.op, node.attr["value"].tensor.SerializeToString() if node.op == "Const" else b"")
        for graph in functions_of(dataset)
        for node in nodes(graph.as_graph_def())
    )


def _not_callable_with_example(function: Any) -> str:
    """Returns why a function cannot be called with example=...; "" if it can, or if no one can tell."""
    if not callable(function):
        return f"it is {function!r}, not a function"
    try:
        inspect.signature(function).bind(example=None)
    except TypeError as error:
        return str(error)
    except ValueError as error:  # a partial with a keyword that its function has not
        return str(error) if hasattr(function, "keywords") else ""
    return ""


def _needed_arguments(function: Any) -> int | None:
    """Returns how many positional arguments a function needs; None if it takes any number, or no one can tell.

    For a Keras layer it counts the arguments of `call`.

    Raises:
      UsageError: for what is no function.
    """
    if not callable(function):
        raise UsageError(f"data_augmentation={function!r} is not a function")
    called = function.call if hasattr(function, "get_config") and hasattr(function, "call") else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    return sum(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters
    )
