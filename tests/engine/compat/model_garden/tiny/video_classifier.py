"""A 3D ResNet on videos, cut to one block, and clips of 4 frames of 16 x 16.

Where a clip begins, its crop and its flip are always random in training, drawn in a parallel map: two runs differ. With
op determinism they do not run at all, because they draw a crop without a seed. So the randomness is left without
effect: a clip is as long as the video, a crop is the whole image, and all columns of an image are equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import official.vision.configs.video_classification
import official.vision.tasks.video_classification  # noqa: F401 -- registers the task
import tensorflow as tf
from official.vision.modeling.backbones import resnet_3d

from tests.engine.compat.model_garden.tiny.records import generator, image, integers, strings, write_shards
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, cut, data, optimizer, trainer

CLASSES, FRAMES, SIZE, BATCH = 4, 4, 16, 4
TINY_ID = 8

# Their smallest has 50 layers, and no multiplier for its width.
resnet_3d.RESNET_SPECS[TINY_ID] = [("bottleneck3d", 4, 1)]


def write(folder: Path) -> None:
    """Videos of noisy stripes; the colour tells the class."""
    for part, count in (("train", 24), ("validation", 10)):
        random = generator(part)
        write_shards(folder, part, [_video(random) for _ in range(count)])


def _video(random: np.random.Generator) -> tf.train.SequenceExample:
    label = int(random.integers(CLASSES))
    frames = [strings([_stripes(random, label)]) for _ in range(FRAMES)]
    return tf.train.SequenceExample(
        context=tf.train.Features(feature={"clip/label/index": integers([label])}),
        feature_lists=tf.train.FeatureLists(feature_list={"image/encoded": tf.train.FeatureList(feature=frames)}),
    )


def _stripes(random: np.random.Generator, label: int) -> bytes:
    """A PNG, because a JPEG's columns are only nearly equal; their decoder takes either."""
    encoded: bytes = tf.io.encode_png(np.repeat(image(random, label, SIZE)[:, :1], SIZE, axis=1)).numpy()
    return encoded


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """In float32; they default to bfloat16."""
    block = {"temporal_strides": 1, "temporal_kernel_sizes": [3], "use_self_gating": False}
    backbone = {"type": "resnet_3d", "resnet_3d": {"model_id": TINY_ID, "block_specs": [block]}}
    reading = {"num_classes": CLASSES, "feature_shape": [FRAMES, SIZE, SIZE, 3], "min_image_size": SIZE}
    no_crop = {f"aug_{limit}_{what}_ratio": 1.0 for limit in ("min", "max") for what in ("aspect", "area")}
    task = {
        "model": {"backbone": backbone, "dropout_rate": 0.0},
        "train_data": data(folder, "train", BATCH, **reading, **no_crop),
        "validation_data": data(folder, "validation", BATCH, **reading),
    }
    optimizer_config = optimizer("sgd", 0.005, momentum=0.9)
    return cut("video_classification", task, trainer(steps_per_loop, optimizer_config=optimizer_config))
