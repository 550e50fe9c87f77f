"""The state of a task that is not in variables, which its methods `state()` and `restore(state)` save and restore."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any


def has_own_state(task: Any) -> bool:
    """Whether a task has methods `state()` and `restore(state)`, which save its plain values in checkpoints."""
    return all(callable(getattr(task, name, None)) for name in ("state", "restore"))


@contextlib.contextmanager
def kept_states(tasks: Iterable[Any]) -> Iterator[None]:
    """Restores the own state of tasks at the end of this context; tasks without methods for it stay as they are."""
    before = [
        (task, copy.deepcopy(task.state()))
        for task in {id(task): task for task in tasks}.values()
        if has_own_state(task)
    ]
    yield
    for task, state in before:
        if state is not None:
            task.restore(state)
