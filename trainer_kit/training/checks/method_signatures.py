"""Checks, before anything is traced, that the methods of a task accept the arguments they are called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from trainer_kit.errors import TrainerKitError
from trainer_kit.training.task import Task


def check_methods(task: Any, train: bool, evaluate: bool) -> None:
    """Checks the methods of a Task that a run will call; tasks of other classes are not checked.

    Args:
      task: The task.
      train: Whether the run trains it.
      evaluate: Whether the run evaluates it.

    Raises:
      TrainerKitError: when a method does not accept the arguments that it is called with; names file and line.
    """
    if not isinstance(task, Task):
        return
    for name, count, named in _calls(task, train, evaluate):
        method = getattr(task, name)
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):  # a callable that does not tell
            continue
        try:
            signature.bind(*range(count), **dict.fromkeys(named))
        except TypeError as problem:
            wanted = _declared(inspect.signature(getattr(Task, name)))
            raise TrainerKitError(
                f"{_place(method)}: {type(task).__name__}.{name}{_declared(signature)} is called with "
                f"{_described(count, named)}: {problem}; declare it as {name}{wanted}"
            ) from None


def _calls(task: Task, train: bool, evaluate: bool) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yields the method's name, number of positional arguments and keyword names of each call that a run makes."""
    default_training = train and type(task).train_step is Task.train_step
    default_validation = evaluate and type(task).validation_step is Task.validation_step
    yield "build_metrics", 0, ("training",)
    if train:
        yield "train_step", 1, ("model", "optimizer", "metrics")
    if evaluate:
        yield "validation_step", 1, ("model", "metrics")
    if default_training or default_validation:
        yield "build_losses", 0, ("labels", "model_outputs", "aux_losses")
        yield "process_metrics", 3, ()
    if default_validation:
        yield "inference_step", 2, ()


def _described(count: int, named: tuple[str, ...]) -> str:
    """Describes the arguments of a call in words."""
    positional = [f"{count} positional argument{'s' if count > 1 else ''}"] if count else []
    return " and ".join([*positional, ", ".join(f"{name}=" for name in named)] if named else positional)


def _declared(signature: inspect.Signature) -> str:
    """Returns the parameters as text, without types."""
    empty = inspect.Parameter.empty
    return f"({', '.join(str(one.replace(annotation=empty)) for one in signature.parameters.values())})"


def _place(method: Any) -> str:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "the task"
