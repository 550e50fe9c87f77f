"""A vision transformer on imagenet, cut to two layers of 16 and images of 32 x 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import official.vision.configs.image_classification
import official.vision.tasks.image_classification  # noqa: F401 -- registers the task
from official.vision.modeling.backbones import vit

from tests.engine.compat.model_garden.tiny.image_classifier import CLASSES, SIZE, write
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, cut, data, trainer

__all__ = ["config", "write"]

BATCH = 8
TINY = {"hidden_size": 16, "patch_size": 8, "transformer": {"mlp_dim": 32, "num_heads": 2, "num_layers": 2}}

# The table of sizes overrides what a config says of them, so that a size of our own has to be in the table.
vit.VIT_SPECS = {**vit.VIT_SPECS, "vit-tiny": TINY}


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """Without random crops and flips; the data are those of the ResNet."""
    backbone = {"type": "vit", "vit": {"model_name": "vit-tiny", "representation_size": 16}}
    task = {
        "model": {"num_classes": CLASSES, "input_size": [SIZE, SIZE, 3], "backbone": backbone},
        "evaluation": {"top_k": 2},
        "train_data": data(folder, "train", BATCH, aug_crop=False, aug_rand_hflip=False),
        "validation_data": data(folder, "validation", BATCH),
    }
    learning_rate = {"cosine": {"initial_learning_rate": 3e-3, "decay_steps": 50}}
    optimizer_config = {"learning_rate": learning_rate, "warmup": {"linear": {"warmup_steps": 5}}}
    return cut("vit_imagenet_pretrain", task, trainer(steps_per_loop, optimizer_config=optimizer_config))
