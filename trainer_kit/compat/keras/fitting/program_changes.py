"""What a compiled model was made of, so that a resumed run can tell that its program has changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Keras numbers the names of the layers that a process makes, which stand in these parts of a config.
_NAMED = ("name", "inbound_nodes", "input_layers", "output_layers")


def description(model: Any) -> dict[str, Any]:
    """Returns what a model was made of as JSON values: its loss, the settings of its optimizer, and its layers.

    The optimizer is left out if it has trained, since callbacks may have changed its settings.
    """
    found: dict[str, Any] = {"loss": _text(getattr(model, "loss", None))}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not int(tf.convert_to_tensor(optimizer.iterations)):
        config: dict[str, Any] = {}
        with contextlib.suppress(NotImplementedError):  # of several in one, such as one of TensorFlow Recommenders
            config = optimizer.get_config()
        settings = {name: _text(value) for name, value in config.items() if name not in _NAMED}
        found["optimizer"] = {"class": type(optimizer).__name__, **settings}
    found["layers"] = [[type(layer).__name__, _digest(layer)] for layer in getattr(model, "layers", ())]
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a phrase for each difference of two descriptions."""
    found = []
    if before["loss"] != now["loss"]:
        found.append(f"the loss was {before['loss']} and is {now['loss']}")
    old, new = before.get("optimizer"), now.get("optimizer")
    if old and new:
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        found += [f"{name} of the optimizer was {old.get(name)} and is {new.get(name)}" for name in names]
    kinds, kinds_now = ([kind for kind, _ in one["layers"]] for one in (before, now))
    if kinds != kinds_now:
        found.append(f"the layers were {', '.join(kinds)} and are {', '.join(kinds_now)}")
    else:
        pairs = zip(before["layers"], now["layers"], strict=True)
        other = [f"{number} ({one[0]})" for number, (one, two) in enumerate(pairs) if one != two]
        if other:
            found.append(f"the arguments of layer {', '.join(other)} are others")
    return found


def _text(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:g}"
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    if hasattr(value, "get_config"):
        return f"{type(value).__name__} {_text(value.get_config())}"
    return value if isinstance(value, str) else _ADDRESS.sub("", json.dumps(_unnamed(value), default=repr))


def _digest(layer: Any) -> str:
    try:
        config = layer.get_config()
    except Exception:  # a layer of the user's own that has no config
        return ""
    text = json.dumps(_unnamed(config), default=repr, sort_keys=True)
    return hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:8]


def _unnamed(config: Any) -> Any:
    """Returns a config without the names in it."""
    if isinstance(config, Mapping):
        return {str(key): _unnamed(value) for key, value in config.items() if key not in _NAMED}
    return [_unnamed(one) for one in config] if isinstance(config, (list, tuple)) else config
