"""Errors of programs of Tensorpack, which name the line of the program that they are about."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from trainer_kit.compat.tensorpack.installed_package import find_original_folder
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.errors.user_frames import select_user_frames

_Function = TypeVar("_Function", bound=Callable[..., Any])

# What to do, by words of Tensorpack's messages.
_ADVICE = {
    "Cannot nest TowerContext": "leave the outer context first: a tower is built in one context",
    "tower_func can only be called once": (
        "a trainer has one tower function: build both models in it, or create a second trainer"
    ),
    "setup_graph can only be called once": "create another trainer for another graph",
}


def name_user_line(message: str, stack: Iterable[Any] | None = None) -> str:
    """Returns a message with the deepest line of the program in a stack before it.

    Args:
      message: The message.
      stack: Frame summaries of Python or TensorFlow. None: the current stack.
    """
    if stack is None:
        stack = traceback.extract_stack()
    frames = select_user_frames(stack)
    if not frames:
        return message
    return f"{frames[-1]}: {message}"


class ProgramError(UsageError):
    """A mistake in a program, with the line of the program that runs.

    Args:
      message: What was given, what is allowed and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(name_user_line(message))


class UnknownTensorError(UsageError, KeyError):
    """A graph has no tensor or operation of a name.

    Args:
      name: The name.
      graph: The graph.
    """

    def __init__(self, name: str, graph: tf.Graph) -> None:
        super().__init__(name)
        self._name = name
        self._graph = graph
        self._place = name_user_line("")

    def __str__(self) -> str:
        # Tensorpack tries names and catches this error, so the search waits for a reader.
        operation_name = self._name.split(":")[0]
        wanted = operation_name.rpartition("/")[2]
        names = [operation.name for operation in self._graph.get_operations()]
        near_names = []
        for name in names:
            last_part = name.rpartition("/")[2]
            if last_part and (wanted.startswith(last_part) or last_part.startswith(wanted)):
                near_names.append(name)
        advice = suggest_names(operation_name, near_names or names, max_listed=5)
        return f"{self._place}the graph has no tensor {self._name!r}; {advice}"


def explain_assertions(function: _Function) -> _Function:
    """Returns a function in which assertions of the installed package become UsageErrors.

    Assertions of the program stay what they are.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except AssertionError as error:
            stack = traceback.extract_tb(error.__traceback__)
            last_frame = stack[-1]
            if not last_frame.filename.startswith(os.path.join(find_original_folder(), "")):
                raise
            message = str(error)
            if " " not in message:
                # An assertion without words, or with the value alone.
                message = f"{message or 'this'} does not fit: Tensorpack checks {last_frame.line}"
            parts = [message.rstrip("!.")]
            for words, advice in _ADVICE.items():
                if words in message:
                    parts.append(advice)
            message = "; ".join(parts)
            # The traceback begins here, and the program may have called this function.
            raise UsageError(
                name_user_line(message, [*traceback.extract_stack(), *stack])
            ) from error

    return call  # type: ignore[return-value]
