"""What Tensorpack's callbacks remember, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer_kit.compat.tensorpack.callbacks.base import Callback
from trainer_kit.compat.tensorpack.callbacks.graph import RunOp
from trainer_kit.compat.tensorpack.callbacks.monitor import ScalarHistory
from trainer_kit.compat.tensorpack.callbacks.param import (
    GraphVarParam,
    HyperParamSetter,
    ScheduledHyperParamSetter,
    StatMonitorParamSetter,
)
from trainer_kit.compat.tensorpack.callbacks.saver import MinSaver
from trainer_kit.compat.tensorpack.callbacks.trigger import PeriodicTrigger

# The attributes that decide what a callback does next, by class. Others follow from the program.
_REMEMBERED = {
    HyperParamSetter: ("_last_value", "_last_epoch_set"),
    StatMonitorParamSetter: ("history",),
    MinSaver: ("best",),
    ScalarHistory: ("_dic",),
}


def read_states(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Returns the states of callbacks by class and number, in JSON types.

    A callback of a user may have methods `state` and `restore`, as callbacks of trainer_kit have.
    """
    states = {}
    for key, callback in _flatten(callbacks).items():
        if hasattr(callback, "state") and hasattr(callback, "restore"):
            states[key] = callback.state()
            continue
        values = {}
        for name in _remembered_names(callback):
            values[name] = _to_json(getattr(callback, name))
        if _sets_attribute(callback):
            values["param"] = _to_json(callback.get_current_value())
        states[key] = values
    return states


def restore_states(callbacks: Iterable[Callback], states: Mapping[str, Any]) -> None:
    """Restores what `read_states` returned.

    What Tensorpack does at the begin of a training is not done again.
    """
    for key, callback in _flatten(callbacks).items():
        state = states.get(key)
        if state is None:
            continue
        if hasattr(callback, "state") and hasattr(callback, "restore"):
            callback.restore(state)
            continue
        for name in _remembered_names(callback):
            if name in state:
                current = getattr(callback, name)
                setattr(callback, name, _from_json(state[name], current))
        if _sets_attribute(callback):
            callback.param.set_value(state["param"])
        if isinstance(callback, HyperParamSetter):
            callback._enable_before_train = False
        if isinstance(callback, ScheduledHyperParamSetter):
            callback._set_at_beginning = False
        if isinstance(callback, RunOp):
            callback.run_before = False
        if isinstance(callback, PeriodicTrigger):
            callback._do_before_train = False


def _sets_attribute(callback: object) -> bool:
    """Whether a callback sets something that is no variable of the graph."""
    return isinstance(callback, HyperParamSetter) and not isinstance(callback.param, GraphVarParam)


def _flatten(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns the callbacks with those that proxies and groups contain, by name and number."""
    flat: dict[str, Any] = {}
    waiting = list(callbacks)
    while waiting:
        callback = waiting.pop(0)
        # The class, with what the callback sets or writes.
        name = type(callback).__name__
        if isinstance(callback, HyperParamSetter):
            name += f" {callback.param.readable_name}"
        elif isinstance(callback, MinSaver):
            name += f" {callback.filename}"

        number = sum(key.startswith(f"{name}/") for key in flat)
        flat[f"{name}/{number}"] = callback
        inner = [getattr(callback, "cb", None), *getattr(callback, "_monitors", ())]
        waiting += [item for item in inner if isinstance(item, Callback)]
    return flat


def _remembered_names(callback: object) -> list[str]:
    names: list[str] = []
    for callback_class, attributes in _REMEMBERED.items():
        if isinstance(callback, callback_class):
            names += attributes
    return names


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return [_to_json(item) for item in value]
    if hasattr(value, "item"):
        return value.item()
    return value


def _from_json(value: Any, current: Any) -> Any:
    """Returns a value in the type of the current one: a deque, a dict of lists, or plain."""
    if isinstance(current, dict):
        current.clear()
        for key, items in value.items():
            current[key] = [tuple(item) for item in items]
        return current
    if hasattr(current, "maxlen"):
        current.clear()
        current.extend(tuple(item) for item in value)
        return current
    if isinstance(value, list):
        return tuple(value)
    return value
