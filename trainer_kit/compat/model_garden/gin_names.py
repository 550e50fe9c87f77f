"""Makes functions gin configurables under their Model Garden names, whether Model Garden is imported or not."""

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

    gin refuses a short name that two modules have registered as ambiguous, unless it is the full name of one. So the
    function is registered under its short name alone: `get_train_actions.x = 1` binds it, whether Model Garden is
    imported or not. A binding by the full name of Model Garden's function, which gin accepts only when that is
    imported, applies as well. As always, a binding never overrides an argument that the caller passed.

    Args:
      theirs: The full name of the function in Model Garden.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        module, function.__module__ = function.__module__, None  # type: ignore[assignment]
        try:
            with gin.unlock_config():  # this module may be imported after gin has parsed and locked its config
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
                # gin raises a copy, whose message ends with the name of the function.
                raised = error.__context__ if isinstance(error.__context__, TrainerKitError) else error
                raise raised from raised.__cause__

        return call

    return decorate


def bindings_of(theirs: str, given: Collection[str]) -> dict[str, Any]:
    """Returns gin's bindings for a function or class of Model Garden, except for arguments that the caller passes.

    Args:
      theirs: The full name of the function or class in Model Garden.
      given: The names of the arguments that the caller passes.
    """
    try:
        bound = gin.get_bindings(theirs)
    except ValueError:  # Model Garden's module is not imported
        return {}
    return {name: value for name, value in bound.items() if name not in given}
