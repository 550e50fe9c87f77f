r"""Classifies the images of a folder that has one subfolder for each class.

The data: 800 generated pictures of triangles, squares, pentagons and circles, as PNG files in
~/.keras/datasets. Your own images (JPEG, PNG, BMP or GIF) take their place with
`--params_override=task.folder=path/to/folder`. `task.image_size` is the size they are scaled to.

Run:      python -m trainer_kit.train --experiment=image_folder --mode=train_and_eval \
              --model_dir=runs/image_folder
Expected: `accuracy` 0.94 to 0.99 on held-out images, by the seed. Guessing one class gives 0.29.
Cost:     under a minute on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw

import trainer_kit as tk

# The generated classes and their corners. With 40 corners a polygon looks like a circle.
SHAPES = {"triangle": 3, "square": 4, "pentagon": 5, "circle": 40}
IMAGES_PER_SHAPE = 200
DRAWN_SIZE = 48


@tk.configclass
class ImageFolderConfig(tk.TaskConfig):
    """The settings of the task.

    Attributes:
      folder: The folder with one subfolder for each class. Empty: generated pictures of shapes.
      image_size: The height and the width that all images are scaled to.
      validation_share: The share of the images that is held out.
    """

    folder: str = ""
    image_size: int = 48
    validation_share: float = 0.2


@tk.register_task(ImageFolderConfig)
class ImageFolderTask(tk.Task):
    """Tells the classes apart by a small convolutional net."""

    def build_model(self) -> keras.Model:
        """Returns the net: images [batch, size, size, 3] in 0..255 to logits [batch, classes]."""
        layers = keras.layers
        size = self.task_config.image_size
        model = keras.Sequential([keras.Input((size, size, 3)), layers.Rescaling(1 / 255)])
        # These layers change images in training only; evaluations and exports pass them on.
        model.add(layers.RandomFlip("horizontal_and_vertical"))
        model.add(layers.RandomRotation(0.1))
        for filters in (16, 32, 64):
            model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
            model.add(layers.BatchNormalization(momentum=0.9))
            model.add(layers.ReLU())
            model.add(layers.MaxPooling2D())
        # A shape may be anywhere. For photos GlobalAveragePooling2D is more usual.
        model.add(layers.GlobalMaxPooling2D())
        model.add(layers.Dropout(0.2))
        model.add(layers.Dense(len(list_classes(self.find_folder()))))
        return model

    def build_inputs(
        self, params: tk.DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns batches of images, float32 [batch, size, size, 3], and labels, int32 [batch]."""
        batch_size = params.global_batch_size
        if input_context:
            batch_size = input_context.get_per_replica_batch_size(batch_size)
        return keras.utils.image_dataset_from_directory(
            self.find_folder(),
            image_size=(self.task_config.image_size, self.task_config.image_size),
            batch_size=batch_size,
            # Both parts are made with the same seed, so that no image is in both.
            seed=0,
            validation_split=self.task_config.validation_share,
            subset="training" if params.is_training else "validation",
            verbose=False,
        )

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy of the batch."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the share of images whose class is found."""
        return [keras.metrics.SparseCategoricalAccuracy("accuracy")]

    def find_folder(self) -> Path:
        """Returns the folder of the images. Writes the generated ones if the config has none."""
        return Path(self.task_config.folder or write_shapes())


def list_classes(folder: Path) -> list[str]:
    """Returns the names of the subfolders. The place of a name is the label of its images."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def write_shapes() -> Path:
    """Writes the generated pictures, unless they are there already; returns their folder."""
    folder = Path.home() / ".keras" / "datasets" / "trainer_kit_shapes"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The folder gets its name when it is complete.
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        rng = np.random.default_rng(0)
        for name, corners in SHAPES.items():
            (unfinished / name).mkdir()
            for number in range(IMAGES_PER_SHAPE):
                draw_shape(corners, rng).save(unfinished / name / f"{number:03}.png")
        unfinished.rename(folder)
    return folder


def draw_shape(corners: int, rng: np.random.Generator) -> Image.Image:
    """Returns a picture of a dark polygon on a light background, at a random place, with noise."""
    background = tuple(rng.integers(150, 256, 3))
    color = tuple(rng.integers(0, 130, 3))
    image = Image.new("RGB", (DRAWN_SIZE, DRAWN_SIZE), background)
    radius = rng.uniform(12, 20)
    x, y = rng.uniform(radius, DRAWN_SIZE - radius, 2)
    turn = int(rng.integers(360))
    ImageDraw.Draw(image).regular_polygon((x, y, radius), corners, turn, color)
    noise = rng.normal(0, 10, (DRAWN_SIZE, DRAWN_SIZE, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


@tk.register_experiment("image_folder")
def image_folder() -> tk.ExperimentConfig:
    """Classifies the images of a folder that has one subfolder for each class."""
    train = {"is_training": True, "global_batch_size": 32}
    held_out = {"is_training": False, "global_batch_size": 32}
    trainer = {
        "train_steps": "25 epochs",
        "steps_per_loop": "1 epoch",
        "validation_interval": "1 epoch",
        "checkpoint_interval": "5 epochs",
        "best_checkpoint_eval_metric": "accuracy",
        "optimizer_config": {"optimizer": "adam", "learning_rate": 3e-3, "schedule": "cosine"},
    }
    task = {"train_data": train, "validation_data": held_out}
    config = tk.ExperimentConfig(task=ImageFolderConfig())
    return config.replace(task=task, trainer=trainer, runtime={"random_seed": 1})
