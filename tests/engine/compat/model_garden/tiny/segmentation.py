"""DeepLab v3 on Pascal VOC, cut to a thin dilated ResNet and images of 32 x 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import official.vision.configs.semantic_segmentation
import official.vision.tasks.semantic_segmentation  # noqa: F401 -- registers the task
from official.vision.data import tf_example_builder
from official.vision.modeling.backbones import resnet_deeplab

from tests.engine.compat.model_garden.tiny.records import generator, write_shards
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, cut, data, optimizer, trainer

CLASSES, SIZE, BATCH = 3, 32, 8
TINY_ID = 8

# A dilated ResNet has no multiplier for its width: the size is a line in this table.
resnet_deeplab.RESNET_SPECS[TINY_ID] = [("bottleneck", width, 1) for width in (4, 4, 8, 8)]


def write(folder: Path) -> None:
    """Noise with a coloured rectangle, and the mask that says where it is."""
    for part, count in (("train", 24), ("validation", 20)):
        random = generator(part)
        write_shards(folder, part, [_example(random) for _ in range(count)])


def _example(random: np.random.Generator) -> Any:
    pixels = random.integers(0, 60, size=(SIZE, SIZE, 3)).astype(np.uint8)
    mask = np.zeros((SIZE, SIZE, 1), np.uint8)
    y, x = random.integers(0, SIZE // 2, size=2)
    height, width = random.integers(SIZE // 2, SIZE, size=2)
    label = random.integers(1, CLASSES)
    pixels[y : y + height, x : x + width, label] = 220
    mask[y : y + height, x : x + width] = label
    builder = tf_example_builder.TfExampleBuilder()
    builder.add_image_matrix_feature(pixels).add_semantic_mask_matrix_feature(mask)
    return builder.example


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """Without random scales and flips. The truth is resized: without that, they report a validation loss of 0."""
    training = {"aug_rand_hflip": False, "aug_scale_min": 1.0, "aug_scale_max": 1.0}
    validation = {"resize_eval_groundtruth": True, "groundtruth_padded_size": []}
    task = {
        "init_checkpoint": None,
        "model": _model(),
        "train_data": data(folder, "train", BATCH, output_size=[SIZE, SIZE], **training),
        "validation_data": data(folder, "validation", BATCH, output_size=[SIZE, SIZE], **validation),
    }
    optimizer_config = optimizer("sgd", 0.02, momentum=0.9)
    return cut("seg_deeplabv3_pascal", task, trainer(steps_per_loop, optimizer_config=optimizer_config))


def _model() -> dict[str, Any]:
    resnet = {"model_id": TINY_ID, "multigrid": [1], "stem_type": "v0"}
    return {
        "num_classes": CLASSES,
        "input_size": [SIZE, SIZE, 3],
        "backbone": {"type": "dilated_resnet", "dilated_resnet": resnet},
        "decoder": {"type": "aspp", "aspp": {"dilation_rates": [1, 2], "num_filters": 8}},
        "head": {"num_filters": 8},
        "norm_activation": {"norm_momentum": 0.9, "norm_epsilon": 0.1},
    }
