"""Finds the metrics that a function of a loop by hand uses."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def used_metrics(function: Callable[..., Any]) -> list[Any]:
    """Returns the metrics, of either Keras, that a function can reach by its names. Runs on the host.

    These are metrics in variables around the function, in lists and dicts there, in attributes of the object whose
    method it is, and those of functions of the same package that it calls.

    Args:
      function: A function or a method, decorated with tf.function or not.
    """
    found: dict[int, Any] = {}
    waiting, seen = [function], set[int]()
    while waiting:
        one = waiting.pop()
        plain = getattr(one, "python_function", one)
        if id(plain) in seen:
            continue
        seen.add(id(plain))
        for value in _values_around(plain):
            if hasattr(value, "update_state") and hasattr(value, "result"):
                found[id(value)] = value
            elif _package(value) == _package(function):
                waiting.append(value)
    return list(found.values())


def _values_around(function: Any) -> Iterator[Any]:
    """Yields the values that a function has in its variables, and those in attributes of its object."""
    for one in {id(one): one for one in (function, inspect.unwrap(function))}.values():
        owners = [getattr(one, "__self__", None)]
        body = getattr(one, "__func__", one)
        if inspect.isfunction(body):
            with contextlib.suppress(ValueError):  # a variable around the function that has no value yet
                names = inspect.getclosurevars(body)
                yield from _flat([*names.nonlocals.values(), *names.globals.values()])
                # A tf.function that is a method holds its object by a weak reference.
                owners += [value() for value in names.nonlocals.values() if isinstance(value, weakref.ref)]
        yield from _flat(value for owner in owners if hasattr(owner, "__dict__") for value in vars(owner).values())


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yields values, and those in lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, Mapping):
            yield from value.values()
        else:
            yield value


def _package(function: Any) -> str | None:
    """Returns the first part of the name of the module in which a function is defined; None for other objects."""
    plain = getattr(function, "python_function", function)
    if not inspect.isroutine(plain):
        return None
    return str(plain.__module__).partition(".")[0]
