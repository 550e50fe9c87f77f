"""The tiny experiments by name: how each is configured, and how its data are written."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# name: (module, function that returns the config)
_PLACES = {
    "mock": ("mock_task", "config"),
    "resnet": ("image_classifier", "config"),
    "resnet_crops": ("image_classifier", "config_with_crops"),
    "bert": ("sentence_prediction", "config"),
    "transformer": ("translation", "config"),
    "retinanet": ("detector", "config"),
    "vit": ("vision_transformer", "config"),
    "video": ("video_classifier", "config"),
    "segmentation": ("segmentation", "config"),
    "multitask_joint": ("multi_task", "config_joint"),
    "multitask_interleaving": ("multi_task", "config_interleaving"),
}
NAMES = tuple(_PLACES)


class Tiny(NamedTuple):
    """One experiment; `model` is there for multi-task experiments, whose model is made beside the tasks."""

    config: Callable[[Path, int], Any]
    write: Callable[[Path], None]
    model: Callable[[], Any] | None


def tiny(name: str) -> Tiny:
    """Imports the one module that the experiment needs, because each imports much of official."""
    module_name, function = _PLACES[name]
    module = importlib.import_module(f"tests.engine.compat.model_garden.tiny.{module_name}")
    return Tiny(getattr(module, function), module.write, getattr(module, "model", None))
