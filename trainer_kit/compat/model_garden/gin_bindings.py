"""Gives functions the gin bindings of their Model Garden namesakes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

import gin

_P = ParamSpec("_P")
_R = TypeVar("_R")


def accept_gin_bindings(garden_name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator that makes a function take the bindings of its namesake.

    The function itself is not registered with gin: gin would refuse a short name that two modules
    have registered. As always, a binding never overrides an argument that the caller passed.

    Args:
      garden_name: The full name of the function in Model Garden.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            passed = inspect.signature(function).bind_partial(*args, **kwargs).arguments
            bindings: Any = get_gin_bindings(garden_name, passed)
            return function(*args, **kwargs, **bindings)

        return call

    return decorate


def get_gin_bindings(garden_name: str, passed_names: Collection[str]) -> dict[str, Any]:
    """Returns gin's bindings for a function or class of Model Garden.

    Those of arguments that the caller passes are left out.

    Args:
      garden_name: The full name of the function or class in Model Garden, whose module is imported.
      passed_names: The names of the arguments that the caller passes.
    """
    bindings = {}
    for name, value in gin.get_bindings(garden_name).items():
        if name not in passed_names:
            bindings[name] = value
    return bindings
