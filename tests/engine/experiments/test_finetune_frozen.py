"""The experiment `finetune_frozen`: its split, and a short run with a frozen body."""

from __future__ import annotations

import math
from pathlib import Path

import trainer_kit
from trainer_kit.experiments.finetune_frozen import load_images

SHORT = {"train_steps": 4, "steps_per_loop": 4, "checkpoint_interval": 4}


def test_both_parts_have_all_five_digits_and_no_image_twice() -> None:
    parts = [load_images(5, is_training) for is_training in (True, False)]
    images = {image.tobytes() for images, _ in parts for image in images}

    assert len(images) == sum(len(labels) for _, labels in parts) == 896
    for images, labels in parts:
        assert images.shape[1:] == (8, 8, 1)
        assert set(labels) == {0, 1, 2, 3, 4}


def test_a_frozen_body_keeps_its_weights(tmp_path: Path) -> None:
    config = trainer_kit.get_experiment("finetune_frozen").replace(trainer=SHORT)
    first, _ = trainer_kit.launch(config, "train", str(tmp_path / "first"))
    taken = [{"path": str(tmp_path / "first"), "exclude": ["head"]}]
    config = config.replace(
        task={"first_digit": 5, "init_checkpoint": taken},
        trainer={"freeze": ["body"], "validation_interval": 4},
    )
    tuned, logs = trainer_kit.launch(config, "train_and_eval", str(tmp_path / "head"))

    before, after = first.get_layer("body").get_weights(), tuned.get_layer("body").get_weights()
    assert [weights.tobytes() for weights in before] == [weights.tobytes() for weights in after]
    assert len(tuned.trainable_variables) == 2  # of the head
    assert math.isfinite(logs["validation_loss"])
