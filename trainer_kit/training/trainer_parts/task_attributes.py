"""TaskAttributes: watches the plain Python values of a task, which no checkpoint holds."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer_kit.errors import UsageError
from trainer_kit.errors.user_frames import is_framework

_LOG = logging.getLogger(__name__)
_LARGE = 1000  # bytes; larger arrays are data, and are not compared
_COMPARED = 100  # items of a container that are compared, including nested ones, since this is done often
_ABSENT: Any = object()


class TaskAttributes:
    """Warns, once for each, of task attributes that change during training and that a resumed run would lose.

    A task with methods `state()` and `restore(state)` saves its own state; the only check is that evaluations do not
    change it. All methods are eager, on the host. With `required` they raise UsageError instead of a warning.

    Args:
      task: The run's task.
      trains: Whether the trainer will train.
      required: Whether the config asks for an exact resume.
    """

    def __init__(self, task: Any, *, trains: bool, required: bool) -> None:
        self._task, self._trains, self._required = task, trains, required
        self._values: PlainValues | None = None
        self._reported: set[str] = set()
        self._before_evaluation = ""
        self._looks = 0

    def first_step_done(self) -> None:
        """Remembers the values after the first step, when caches are filled, to compare later values with them."""
        if not has_own_state(self._task):
            self._values = PlainValues(self._task)

    def look(self) -> None:
        """Warns of changed attributes before and after loops 1, 2, 4, 8 and so on; called before and after each loop.

        A check takes longer than a loop of one small step. Saves and evaluations always check.
        """
        self._looks += 1
        loop = (self._looks + 1) // 2
        if loop & (loop - 1) == 0:
            self.report()

    def report(self) -> None:
        """Warns of the task's attributes that have changed since the first step."""
        changed = [] if self._values is None else self._values.changed()
        new = [name for name in changed if name not in self._reported]
        self._reported.update(new)
        if new:
            self._tell(
                f"{', '.join(new)} changes while the run trains, and no checkpoint holds it: a resumed run begins with "
                "the initial value; give the task methods state() and restore(state), or keep the value in a "
                "tf.Variable"
            )

    def evaluation_begins(self) -> None:
        """Warns of changed attributes, and keeps what the task's `state()` returns until the evaluation succeeded."""
        self.report()
        self._before_evaluation = self._own_state()

    def evaluation_succeeded(self) -> None:
        """Warns if the evaluation has changed what the task's `state()` returns."""
        if self._own_state() == self._before_evaluation:
            return
        text = (
            f"the evaluation changes what {type(self._task).__name__}.state() returns: a checkpoint is saved before "
            "the evaluation of its step, and a resumed run does not repeat the evaluations on record, so it will not "
            "be the same as one that was never stopped; change that state in training only"
        )
        if text not in self._reported:
            self._reported.add(text)
            self._tell(text)

    def evaluation_ends(self) -> None:
        """Accepts the current values: changes during an evaluation are not part of the training state."""
        if self._values is not None:
            self._values.changed()

    def _tell(self, text: str) -> None:
        if self._required:
            raise UsageError(f"trainer.require_exact_resume: {text}")
        _LOG.warning("%s", text)

    def _own_state(self) -> str:
        """Returns the result of the task's `state()` as text to compare; "" if the task has no such method."""
        if not (self._trains and has_own_state(self._task)):
            return ""
        return json.dumps(self._task.state(), default=repr, sort_keys=True)


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


class PlainValues:
    """Watches the attributes of an object that hold numbers, texts, or containers of them.

    An attribute that appears, or was None, has not changed: caches start like that. Attributes of nested objects are
    watched too if these are of the user's classes.

    Args:
      one: The object.
    """

    def __init__(self, one: Any) -> None:
        self._one = one
        self._values = _plain_values(one)

    def changed(self) -> list[str]:
        """Returns the names of the attributes whose values have changed since the last call."""
        before, self._values = self._values, _plain_values(self._one)
        both = before.keys() & self._values.keys()
        return sorted(f"{type(self._one).__name__}.{name}" for name in both if before[name] != self._values[name])


def _plain_values(one: Any, depth: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _attributes(one).items():
        plain = _plain(value, [_COMPARED])
        if plain is not _ABSENT and value is not None:
            found[name] = plain
        elif depth and _is_users(type(value)):
            found.update((f"{name}.{inner}", plain) for inner, plain in _plain_values(value, depth - 1).items())
    return found


def _attributes(one: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name, including those that its class defines."""
    classes = [vars(kind) for kind in reversed(type(one).__mro__) if _is_users(kind)]
    first = {name: value for one in classes for name, value in one.items() if not name.startswith("__")}
    return {**first, **getattr(one, "__dict__", {})}


def _plain(value: Any, left: list[int]) -> Any:
    """Returns a copy of a plain value to compare; _ABSENT for other values.

    Args:
      value: The value of an attribute.
      left: The number of items that may still be copied; for a container with more items, its length is returned.
    """
    left[0] -= 1
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value if value == value else "NaN"  # NaN is not equal to itself
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        items: Any = (part for pair in value.items() for part in pair)
    elif type(value) in (list, tuple, set):
        items = value
    elif type(value).__module__ == "numpy" and getattr(value, "nbytes", _LARGE) < _LARGE:
        return (value.shape, value.tobytes())
    else:
        return _ABSENT
    if len(value) > left[0]:
        return _ABSENT if any(_plain(part, [1]) is _ABSENT for part in itertools.islice(items, 2)) else len(value)
    parts = [_plain(part, left) for part in (sorted(items, key=repr) if isinstance(value, set) else items)]
    return _ABSENT if any(part is _ABSENT for part in parts) else parts


def _is_users(kind: type) -> bool:
    """Whether a class is a user's: not of Python, TensorFlow or Keras, nor a subclass of one of the latter two."""
    tops = {one.__module__.partition(".")[0] for one in kind.__mro__}
    return not tops & {"tensorflow", "keras", "tf_keras"} and not is_framework(kind.__module__)
