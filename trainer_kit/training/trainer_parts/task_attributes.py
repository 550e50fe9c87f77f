"""TaskAttributes: watches the plain Python values of a task, which no checkpoint holds."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from typing import Any

from trainer_kit.errors import UsageError
from trainer_kit.errors.user_frames import is_framework

_LOG = logging.getLogger(__name__)
_LARGE = 1000  # bytes of an array that is compared; a larger one is data
_COMPARED = 100  # items of a container that are compared, those of nested ones included: it is done for each loop
_ABSENT: Any = object()


class TaskAttributes:
    """Warns, once for each, of values of a task that change while the run trains and that a resume would lose.

    A task with methods `state()` and `restore(state)` says itself what its state is; only an evaluation may not change
    that. All methods are eager, on the host, and raise UsageError in place of a warning if `required`.

    Args:
      task: of the run.
      trains: whether there will be training.
      required: whether the config asks for an exact resume.
    """

    def __init__(self, task: Any, *, trains: bool, required: bool) -> None:
        self._task, self._trains, self._required = task, trains, required
        self._values: PlainValues | None = None
        self._reported: set[str] = set()
        self._before_evaluation = ""
        self._looks = 0

    def first_step_done(self) -> None:
        """Takes the values after the first step as those that stay: caches are filled by then."""
        if not has_own_state(self._task):
            self._values = PlainValues(self._task)

    def look(self) -> None:
        """Reports changed values when it is called before and after loops 1, 2, 4, 8 and so on.

        A loop of one small step takes less time than a look. Saves and evaluations look in any case.
        """
        self._looks += 1
        loop = (self._looks + 1) // 2
        if loop & (loop - 1) == 0:
            self.report()

    def report(self) -> None:
        """Reports the values that have changed since the first step."""
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
        """Reports changed values, and remembers what the task's `state()` returns."""
        self.report()
        self._before_evaluation = self._own_state()

    def evaluation_succeeded(self) -> None:
        """Reports an evaluation that has changed what the task's `state()` returns."""
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
        """Takes the values as they are now: what an evaluation changes is no state of the training."""
        if self._values is not None:
            self._values.changed()

    def _tell(self, text: str) -> None:
        if self._required:
            raise UsageError(f"trainer.require_exact_resume: {text}")
        _LOG.warning("%s", text)

    def _own_state(self) -> str:
        """Returns what the task's `state()` returns, as text to compare; "" where there is no such state."""
        if not (self._trains and has_own_state(self._task)):
            return ""
        return json.dumps(self._task.state(), default=repr, sort_keys=True)


def has_own_state(task: Any) -> bool:
    """Whether a task has methods `state()` and `restore(state)`, for checkpoints to hold its plain values."""
    return all(callable(getattr(task, name, None)) for name in ("state", "restore"))


class PlainValues:
    """Watches the numbers, texts and containers of such that an object holds in its attributes.

    What appears, or was None, is no change: so do caches begin. Of objects in the attributes, those of the user's own
    classes are looked into as well.

    Args:
      one: the object.
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
    """Returns the attributes of an object by name, with those that its own class gives a first value."""
    classes = [vars(kind) for kind in reversed(type(one).__mro__) if _is_users(kind)]
    first = {name: value for one in classes for name, value in one.items() if not name.startswith("__")}
    return {**first, **getattr(one, "__dict__", {})}


def _plain(value: Any, left: list[int]) -> Any:
    """Returns a copy of a plain value that can be compared, _ABSENT for any other.

    Args:
      value: of an attribute.
      left: how many more items may be copied; of a container with more, its length is returned.
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
    """Whether a class is neither TensorFlow's, Keras' or Python's own nor made from one of TensorFlow or Keras."""
    tops = {one.__module__.partition(".")[0] for one in kind.__mro__}
    return not tops & {"tensorflow", "keras", "tf_keras"} and not is_framework(kind.__module__)
