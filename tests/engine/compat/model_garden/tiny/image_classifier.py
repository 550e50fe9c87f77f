"""A ResNet on imagenet, cut to one block of an eighth of the width and images of 32 x 32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.compat.model_garden.tiny.records import (
    example,
    generator,
    image,
    integers,
    jpeg,
    strings,
    write_shards,
)
from tests.engine.compat.model_garden.tiny.trainer import (
    STEPS_PER_LOOP,
    cut,
    data,
    optimizer,
    trainer,
)

CLASSES = 4
SIZE = 32
BATCH = 8
NORM_EPSILON = 0.01
TINY_ID = 4
BEST = {
    "best_checkpoint_export_subdir": "best",
    "best_checkpoint_eval_metric": "accuracy",
    "best_checkpoint_metric_comp": "higher",
}


def write(folder: Path) -> None:
    """JPEGs a little larger than what the model sees; the training data in two files, as imagenet's
    are in many.
    """
    for part, count, shards in (("train", 48, 2), ("validation", 20, 1)):
        random = generator(part)
        examples = []
        for _ in range(count):
            label = int(random.integers(CLASSES))
            encoded = jpeg(image(random, label, SIZE + 8))
            features = {"image/encoded": strings([encoded]), "image/class/label": integers([label])}
            examples.append(example(**features))
        write_shards(folder, part, examples, shards)


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """Without random crops and flips."""
    # Not above: the imports take seconds, and each worker of pytest imports this module.
    import official.vision.configs.image_classification
    import official.vision.tasks.image_classification  # noqa: F401 -- registers the task
    from official.vision.modeling.backbones import resnet

    # Their smallest has four blocks, of 10 layers.
    resnet.RESNET_SPECS[TINY_ID] = [("residual", 64, 1)]
    model = {
        "num_classes": CLASSES,
        "input_size": [SIZE, SIZE, 3],
        "backbone": {"type": "resnet", "resnet": {"model_id": TINY_ID, "depth_multiplier": 0.125}},
        "norm_activation": {"norm_epsilon": NORM_EPSILON},
    }
    task = {
        "model": model,
        "evaluation": {"top_k": 2},
        "train_data": data(folder, "train", BATCH, aug_crop=False, aug_rand_hflip=False),
        "validation_data": data(folder, "validation", BATCH),
    }
    optimizer_config = optimizer("sgd", 0.002, momentum=0.9)
    return cut(
        "resnet_imagenet", task, trainer(steps_per_loop, optimizer_config=optimizer_config, **BEST)
    )
