"""RetinaNet on COCO, cut to a ResNet of 10 layers of an eighth of the width, and images of 64 x 64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import official.vision.configs.retinanet
import official.vision.tasks.retinanet  # noqa: F401 -- registers the task
from official.vision.data import tf_example_builder
from official.vision.evaluation import coco_utils

from tests.engine.compat.model_garden.tiny.records import generator, write_shards
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, cut, data, optimizer, trainer

CLASSES, SIZE, BATCH = 3, 64, 4
TRUTH = "instances_validation.json"


def write(folder: Path) -> None:
    """Noise with one or two coloured rectangles; the colour tells the class, of which 0 is the background."""
    for part, count in (("train", 24), ("validation", 8)):
        random = generator(part)
        write_shards(folder, part, [_example(random, number) for number in range(count)])
    coco_utils.scan_and_generator_annotation_file(
        str(folder / "validation-*.tfrecord"), "tfrecord", -1, False, str(folder / TRUTH)
    )


def _example(random: np.random.Generator, number: int) -> Any:
    pixels = random.integers(0, 60, size=(SIZE, SIZE, 3)).astype(np.uint8)
    count = random.integers(1, 3)
    corners = random.integers(0, SIZE // 2, size=(count, 2))
    sizes = random.integers(SIZE // 4, SIZE // 2, size=(count, 2))
    labels = random.integers(1, CLASSES, size=count)
    for (y, x), (height, width), label in zip(corners, sizes, labels, strict=True):
        pixels[y : y + height, x : x + width, label] = 220
    low, high = corners / SIZE, (corners + sizes) / SIZE
    builder = tf_example_builder.TfExampleBuilder()
    builder.add_image_matrix_feature(pixels, image_source_id=str(number + 1).encode())
    builder.add_boxes_feature(*(side.tolist() for side in (low[:, 1], high[:, 1], low[:, 0], high[:, 0], labels)))
    builder.add_ints_feature("image/object/is_crowd", [0] * int(count))
    return builder.example


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """Without random scales and flips. Without the COCO file, their evaluation fails with NumPy 2.4."""
    task = {
        "init_checkpoint": None,
        "annotation_file": str(folder / TRUTH),
        "model": _model(),
        "train_data": _data(folder, "train", {"aug_rand_hflip": False, "aug_scale_min": 1.0, "aug_scale_max": 1.0}),
        "validation_data": _data(folder, "validation", {}),
    }
    optimizer_config = optimizer("sgd", 0.005, momentum=0.9)
    return cut("retinanet_resnetfpn_coco", task, trainer(steps_per_loop, optimizer_config=optimizer_config))


def _model() -> dict[str, Any]:
    return {
        "num_classes": CLASSES,
        "input_size": [SIZE, SIZE, 3],
        "min_level": 3,
        "max_level": 4,
        "anchor": {"num_scales": 1, "aspect_ratios": [1.0]},
        "backbone": {"type": "resnet", "resnet": {"model_id": 10, "depth_multiplier": 0.125}},
        "decoder": {"type": "fpn", "fpn": {"num_filters": 8}},
        "head": {"num_convs": 1, "num_filters": 8},
        "detection_generator": {"pre_nms_top_k": 50, "max_num_detections": 10, "pre_nms_score_threshold": 0.0},
    }


def _data(folder: Path, part: str, parser: dict[str, Any]) -> dict[str, Any]:
    return data(folder, part, BATCH, dtype="float32", parser={"max_num_instances": 5, **parser})
