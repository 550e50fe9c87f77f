"""The experiment `image_folder`: its split, the classes of a folder, and a few real steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainer_kit
from trainer_kit.experiments import image_folder
from trainer_kit.experiments.image_folder import ImageFolderConfig, ImageFolderTask

SHORT = {"train_steps": "1 epoch", "checkpoint_interval": "1 epoch"}


def test_no_image_is_in_both_parts(tmp_path: Path) -> None:
    for gray in range(20):  # each image has a color of its own
        (tmp_path / f"class_{gray % 2}").mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), (gray,) * 3).save(tmp_path / f"class_{gray % 2}/{gray}.png")

    task = ImageFolderTask(ImageFolderConfig(folder=str(tmp_path), image_size=16))
    parts = []
    for is_training in (True, False):
        data = trainer_kit.DataConfig(global_batch_size=8, is_training=is_training)
        batches = list(task.build_inputs(data).as_numpy_iterator())
        images = np.concatenate([images for images, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])

        assert images.shape[1:] == (16, 16, 3)
        assert (images[:, 0, 0, 0] % 2 == labels).all()
        parts.append(images[:, 0, 0, 0].tolist())

    assert [len(part) for part in parts] == [16, 4]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    assert task.build_model().output_shape == (None, 2)


def test_the_generated_pictures_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(image_folder, "IMAGES_PER_SHAPE", 20)
    config = trainer_kit.get_experiment("image_folder").replace(trainer=SHORT)

    model, logs = trainer_kit.launch(config, "train_and_eval", str(tmp_path / "run"))

    folder = tmp_path / ".keras" / "datasets" / "trainer_kit_shapes"
    assert len(list(folder.glob("*/*.png"))) == 80
    assert model.output_shape == (None, 4)
    assert math.isfinite(logs["validation_loss"])
    assert 0 <= logs["accuracy"] <= 1
