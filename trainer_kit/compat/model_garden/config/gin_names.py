"""Functions that gin files bind by the names that they have in Model Garden, imported or not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

import gin

from trainer_kit.errors import TrainerKitError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def configurable(theirs: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator that makes a function a gin configurable which takes its namesake's bindings.

    gin refuses a short name that two modules have registered as ambiguous, unless it is the whole name of one. So the
    function is registered under its short name alone: `get_train_actions.x = 1` binds it, whether Model Garden is
    imported or not. A binding by the whole name of Model Garden's function, which gin accepts only when that is
    imported, counts as well. As ever, a binding never beats an argument that the caller passed.

    Args:
      theirs: whole name of the function in Model Garden.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        module, function.__module__ = function.__module__, None  # type: ignore[assignment]
        try:
            with gin.unlock_config():  # the door may be imported when all is parsed
                registered = gin.configurable(function)
        finally:
            function.__module__ = module

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
            bound = bindings_of(theirs, given)
            try:
                return registered(*args, **{**kwargs, **bound})
            except TrainerKitError as error:
                raised = _as_raised(error)
                raise raised from raised.__cause__

        return call

    return decorate


def _as_raised(error: TrainerKitError) -> BaseException:
    """Returns the error without what gin adds to its message, the name of the function that was called."""
    before = error.__context__
    return before if isinstance(before, TrainerKitError) else error


def bindings_of(theirs: str, given: Collection[str]) -> dict[str, Any]:
    """Returns what gin binds of a function or class of Model Garden, without the arguments that are given.

    Args:
      theirs: whole name of it.
      given: names of arguments.
    """
    try:
        bound = gin.get_bindings(theirs)
    except ValueError:  # Model Garden's is not imported
        return {}
    return {name: value for name, value in bound.items() if name not in given}
