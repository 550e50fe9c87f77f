"""A user's function of a batch, as a Source calls it, with its name for messages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph


class BatchFunction:
    """A user's function of a batch, such as `parse` or `transform`.

    It gets one argument, the structure of the batch: for examples (image, label) a tuple of two
    tensors. If its second parameter is named `seed`, or a keyword-only one is, it also gets a seed
    for each example, int32 [batch, 2].

    Args:
      function: Any callable. One whose signature Python cannot read gets the structure alone.
      role: The name of the Source's parameter to which the function was passed.

    Attributes:
      label: The role, name and place of the function, for messages.
      takes_seed: Whether it asks for seeds.

    Raises:
      UsageError: when it cannot be called with one argument.
    """

    def __init__(self, function: Callable[..., object], role: str) -> None:
        self._function = function
        self.label = f"{role} {describe_function(function)}"
        self._seed_argument_kind = _seed_parameter(function)
        self.takes_seed = self._seed_argument_kind is not None
        if problem := _describe_signature_problem(function, self._seed_argument_kind):
            raise UsageError(
                f"{self.label}: {problem}. {role} is called with one argument, the structure of the"
                f" batch: write `def {role}(batch):`, and for examples of (x, y) unpack inside it,"
                " `x, y = batch`. A second parameter named `seed` gets a seed for each example,"
                " int32 [batch, 2]"
            )

    def apply_to(
        self, batches: tf.data.Dataset, *, has_seeds: bool, keep_seeds: bool = False
    ) -> tf.data.Dataset:
        """Returns `batches` with the function applied to each, in graph on the host.

        Args:
          batches: A dataset of batches. With `has_seeds`, of pairs (batch, seeds).
          has_seeds: Whether seeds come with the batches.
          keep_seeds: Whether the result keeps the seeds, for another function.
        """
        # tf.data passes a tuple as several arguments.
        is_unpacked = type(batches.element_spec) is tuple

        @tf.autograph.experimental.do_not_convert
        def call(*parts: Any) -> Any:
            if has_seeds:
                batch, seeds = parts
            else:
                batch = parts if is_unpacked else parts[0]
                seeds = None
            result = self._call(batch, seeds)
            if not keep_seeds:
                return result

            # tf.data makes a tuple of a list that a function returns. Here the list is in a pair.
            if isinstance(result, list):
                result = tuple(result)
            return result, seeds

        mapped = batches.map(call, num_parallel_calls=tf.data.AUTOTUNE)
        mapped.label = self.label
        return mapped

    def _call(self, batch: Any, seeds: tf.Tensor | None) -> Any:
        function = apply_autograph(self._function)
        if self._seed_argument_kind is None:
            return function(batch)
        if self._seed_argument_kind == "position":
            return function(batch, seeds)
        return function(batch, seed=seeds)


def get_function_label(dataset: tf.data.Dataset) -> str | None:
    """Returns the label of the user's function that `BatchFunction.apply_to` maps to a dataset.

    Returns None for other datasets.
    """
    return getattr(dataset, "label", None)


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter] | None:
    """Returns the parameters of a function, or None if Python cannot read its signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _seed_parameter(function: Callable[..., object]) -> Literal["position", "keyword"] | None:
    """Returns how the function takes seeds.

    Returns None when it does not, or when a partial has bound its own seed.
    """
    parameters = _parameters(function) or []
    if isinstance(function, functools.partial) and "seed" in function.keywords:
        return None
    for place, parameter in enumerate(parameters):
        if parameter.name != "seed":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            return "keyword"
        if place == 1 and parameter.kind is not parameter.VAR_POSITIONAL:
            return None if parameter.kind is parameter.VAR_KEYWORD else "position"
    return None


def _describe_signature_problem(function: object, seed_argument_kind: str | None) -> str:
    """Returns why the function cannot be called with its arguments.

    Returns "" if it can be, or if Python cannot read its signature.
    """
    if not callable(function):
        return f"it is {function!r}, not a function"
    if _parameters(function) is None:
        return ""

    # Only the number and the names of the arguments matter, so all of them are 0.
    arguments = (0, 0) if seed_argument_kind == "position" else (0,)
    keywords = {"seed": 0} if seed_argument_kind == "keyword" else {}
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return f"its parameters are {signature}"
    return ""


def describe_function(function: object) -> str:
    """Returns a description such as "augment (task.py:12)". For an object, that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    if callable(function):
        function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    name = name.rpartition("<locals>.")[2]
    code = getattr(function, "__code__", None)
    if not code:
        return name
    file = code.co_filename.rpartition("/")[2]
    return f"{name} ({file}:{code.co_firstlineno})"
