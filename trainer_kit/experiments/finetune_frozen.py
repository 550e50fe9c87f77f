r"""Fine-tunes a net on new classes: first a new head on a frozen body, then all layers.

The data: handwritten digits of 8 x 8 pixels, which come with scikit-learn. The net learns the
digits 0 to 4, and is then fine-tuned on 5 to 9. Your own images go into `load_images`.

Run these in order: the first training, a new head on the frozen body, all layers at a lower rate.

    run="python -m trainer_kit.train --experiment=finetune_frozen --mode=train_and_eval"
    $run --model_dir=runs/first
    $run --model_dir=runs/head --params_override='{task: {first_digit: 5,
        init_checkpoint: [{path: runs/first, exclude: [head]}]}, trainer: {freeze: [body]}}'
    $run --model_dir=runs/all --params_override='{task: {first_digit: 5,
        init_checkpoint: runs/head}, learning_rate: 1e-3}'

Expected: `accuracy` on held-out images of 5 to 9: 0.76 with the frozen body, and 0.99 with all
          layers, both with the seed below; always the same digit would be right in 0.2 of them.
          Without a first training the net reaches 0.99, too: fine-tuning gains where the first
          data is much larger than the second.
Cost:     3 x 10 to 25 seconds on two cores.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer_kit as tk

CLASSES = 5


@tk.configclass
class FinetuneConfig(tk.TaskConfig):
    """The settings of the task.

    Attributes:
      first_digit: The first of the five digits that the net tells apart: 0 or 5.
    """

    first_digit: int = 0


@tk.register_task(FinetuneConfig)
class FinetuneTask(tk.Task):
    """Tells five digits apart by a net of two parts, a body and a head."""

    def build_model(self) -> keras.Model:
        """Returns the net: images [batch, 8, 8, 1] in 0..1 to logits [batch, 5].

        The names `body` and `head` begin the paths of the variables, by which a config chooses what
        is loaded and what is frozen.
        """
        layers = keras.layers
        body = keras.Sequential(name="body")
        body.add(layers.Conv2D(16, 3, padding="same", activation="relu"))
        body.add(layers.Conv2D(32, 3, padding="same", activation="relu"))
        body.add(layers.MaxPooling2D())
        body.add(layers.Conv2D(32, 3, padding="same", activation="relu"))
        body.add(layers.Flatten())
        body.add(layers.Dense(64, activation="relu"))
        head = layers.Dense(CLASSES, name="head")
        return keras.Sequential([keras.Input((8, 8, 1)), body, layers.Dropout(0.3), head])

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> tk.ArraySource:
        """Returns the images and labels of the training part or of the held-out part."""
        images = load_images(self.task_config.first_digit, bool(params.is_training))
        return tk.ArraySource(images, params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy of the batch."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the share of images whose digit is found."""
        return [keras.metrics.SparseCategoricalAccuracy("accuracy")]


def load_images(first_digit: int, is_training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and labels of five digits, to train on or held out.

    Images are float32 [n, 8, 8, 1] in 0..1. Labels are int32 [n] in 0..4: `first_digit` has the
    label 0. A fifth of the images is held out, always the same ones.
    """
    data = load_digits()
    labels = data.target.astype(np.int32) - first_digit
    is_chosen = (labels >= 0) & (labels < CLASSES)
    images = (data.images[is_chosen, ..., None] / 16).astype(np.float32)
    labels = labels[is_chosen]

    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    images, held_out_images, labels, held_out_labels = parts
    return (images, labels) if is_training else (held_out_images, held_out_labels)


@tk.register_experiment("finetune_frozen")
def finetune_frozen() -> tk.ExperimentConfig:
    """Fine-tunes a net on new classes: first a new head on a frozen body, then all layers."""
    train = {"is_training": True, "seed": 1, "global_batch_size": 50}
    held_out = {"is_training": False, "global_batch_size": 100}
    trainer = {
        "train_steps": 300,
        "steps_per_loop": 50,
        "validation_interval": 50,
        "checkpoint_interval": 100,
        "best_checkpoint_eval_metric": "accuracy",
        "optimizer_config": {"optimizer": "adam", "learning_rate": 3e-3, "schedule": "cosine"},
    }
    task = {"train_data": train, "validation_data": held_out}
    config = tk.ExperimentConfig(task=FinetuneConfig())
    return config.replace(task=task, trainer=trainer, runtime={"random_seed": 1})
