"""What a compiled model consists of, so that a resumed run notices a changed program."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.compat.keras.keras_types import CompiledModel

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

# Keras numbers the names of the layers that a process creates. These parts of a config contain
# the names.
_NAME_KEYS = ("name", "inbound_nodes", "input_layers", "output_layers")


def describe_model(model: CompiledModel) -> dict[str, str]:
    """Returns texts that describe a model, by name.

    They describe its loss, the class and settings of its optimizer, and its layers. The optimizer
    is left out if it has trained, since callbacks may have changed its settings. Runs eagerly, on
    the host.
    """
    loss = getattr(model, "loss", None)
    texts = {"the loss": _format_value(loss)}

    optimizer = getattr(model, "optimizer", None)
    updates = 0
    if optimizer is not None:
        iterations = tf.convert_to_tensor(optimizer.iterations)
        updates = int(iterations)
    if optimizer is not None and updates == 0:
        texts["the optimizer"] = type(optimizer).__name__
        settings = _get_config(optimizer)
        for name, value in settings.items():
            texts[f"{name} of the optimizer"] = _format_value(value)

    layers = getattr(model, "layers", ())
    for number, layer in enumerate(layers):
        text = _format_value(layer)
        checksum = zlib.crc32(text.encode())
        kind = type(layer).__name__
        texts[f"layer {number}"] = f"{kind} with arguments {checksum:08x}"
    return texts


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns a phrase for each text that is in both descriptions and differs."""
    phrases = []
    for name, text in now.items():
        old_text = before.get(name, text)
        if old_text != text:
            phrases.append(f"{name} was {old_text} and is {text}")
    return phrases


def _get_config(value: keras.Layer | keras.Loss | keras.Optimizer) -> dict[str, Any]:
    """Returns the config of an object of Keras without names.

    It is {} for an object that has none, such as a layer of a user.
    """
    with contextlib.suppress(Exception):
        config: dict[str, Any] = _normalize_config(value.get_config())
        return config
    return {}


def _format_value(value: object) -> str:
    """Returns a text that is the same in each process: without addresses and numbered names."""
    if callable(value) and hasattr(value, "__name__"):
        return str(value.__name__)
    if hasattr(value, "get_config"):
        config = _format_value(_get_config(value))
        return f"{type(value).__name__} {config}"
    if isinstance(value, str):
        return value
    normalized = _normalize_config(value)
    text = json.dumps(normalized, default=repr)
    return _ADDRESS.sub("", text)


def _normalize_config(config: object) -> Any:
    """Returns a config without the names in it, and with numbers of few digits.

    Some numbers come from a float32.
    """
    if isinstance(config, Mapping):
        normalized = {}
        for key, value in config.items():
            if key not in _NAME_KEYS:
                normalized[str(key)] = _normalize_config(value)
        return normalized
    if isinstance(config, (list, tuple)):
        return [_normalize_config(part) for part in config]
    if isinstance(config, (float, np.floating)):
        digits = f"{config:g}"
        return float(digits)
    return config
