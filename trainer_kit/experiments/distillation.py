r"""Distills a large net into a small one, which learns from the answers of the large one.

The data: handwritten digits of 8 x 8 pixels, which come with scikit-learn. The teacher, a net of
width 32, learns from 1,437 images. The student, of width 4, sees 200 of them, and the teacher's
answers to these. Your own images go into `load_images`.

Run, in this order, the teacher and the student:

    run="python -m trainer_kit.train --experiment=distillation --mode=train_and_eval"
    $run --model_dir=runs/teacher
    $run --model_dir=runs/student \
        --params_override='task: {teacher: runs/teacher, width: 4, images: 200}'

Expected: `accuracy` on held-out images: teacher 0.98, student 0.92 (0.92 to 0.94 with three
          seeds). Without `teacher` the same student reaches 0.89 (0.86 to 0.89); always the same
          digit would be right in 0.1 of them.
Cost:     2 x 10 to 25 seconds on two cores.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer_kit as tk


@tk.configclass
class DistillationConfig(tk.TaskConfig):
    """The settings of the task.

    Attributes:
      teacher: The folder of the teacher's run. Empty: there is no teacher.
      width: The number of filters of the first convolution.
      images: The number of images to train on. 0: all that are not held out.
      temperature: What logits are divided by. A higher one shows more of what the teacher thinks of
        the wrong digits.
      teacher_weight: The share of the teacher's answers in the loss; the labels have the rest.
    """

    teacher: str = ""
    width: int = 32
    images: int = 0
    temperature: float = 3.0
    teacher_weight: float = 0.9


@tk.register_task(DistillationConfig)
class DistillationTask(tk.Task):
    """Learns from labels and, if there is a teacher, from its answers (arXiv 1503.02531)."""

    def build_model(self) -> keras.Model:
        """Returns the net: images [batch, 8, 8, 1] in 0..1 to logits [batch, 10]."""
        layers = keras.layers
        width = self.task_config.width
        model = keras.Sequential([keras.Input((8, 8, 1))])
        for filters in (width, 2 * width):
            model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
            model.add(layers.MaxPooling2D())
        model.add(layers.Flatten())
        model.add(layers.Dense(10))
        return model

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> tk.ArraySource:
        """Returns images and labels: `digit`, int32 [n], and `teacher`, float32 logits [n, 10].

        The teacher answers each training image once. It is no part of the student's model, of its
        checkpoints and exports. With random augmentation it would have to answer in `train_step`.
        """
        images, digits = load_images(bool(params.is_training), self.task_config.images)
        labels = {"digit": digits}
        if self.task_config.teacher and params.is_training:
            teacher = tk.load_model(self.task_config.teacher, "best")
            labels["teacher"] = teacher.predict(images, verbose=0)
        return tk.ArraySource((images, labels), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the cross entropy with the labels, and in training with the teacher's answers."""
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels["digit"], model_outputs)
        )
        if "teacher" not in labels:
            return loss

        temperature = self.task_config.temperature
        answers = tf.nn.softmax(labels["teacher"] / temperature)
        soft_loss = tf.reduce_mean(
            tf.nn.softmax_cross_entropy_with_logits(answers, model_outputs / temperature)
        )
        # The gradient of the soft loss falls with the square of the temperature.
        soft_loss *= temperature**2
        weight = self.task_config.teacher_weight
        return (1 - weight) * loss + weight * soft_loss

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the share of images whose digit is found."""
        return [keras.metrics.SparseCategoricalAccuracy("accuracy")]

    def process_metrics(self, metrics: Any, labels: Any, model_outputs: Any, **kwargs: Any) -> None:
        """Updates the accuracy, which knows nothing of the teacher's answers."""
        for metric in metrics:
            metric.update_state(labels["digit"], model_outputs)


def load_images(is_training: bool, training_images: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, float32 [n, 8, 8, 1] in 0..1, and digits, int32 [n].

    A fifth is held out, always the same images. Of the others the first `training_images` are
    returned, or all of them for 0.
    """
    data = load_digits()
    images = (data.images[..., None] / 16).astype(np.float32)
    digits = data.target.astype(np.int32)
    parts = train_test_split(images, digits, test_size=0.2, stratify=digits, random_state=0)
    images, held_out_images, digits, held_out_digits = parts
    if not is_training:
        return held_out_images, held_out_digits
    count = training_images or len(images)
    return images[:count], digits[:count]


@tk.register_experiment("distillation")
def distillation() -> tk.ExperimentConfig:
    """Distills a large net into a small one, which learns from the answers of the large one."""
    train = {"is_training": True, "seed": 1, "global_batch_size": 50}
    held_out = {"is_training": False, "global_batch_size": 100}
    trainer = {
        "train_steps": 800,
        "steps_per_loop": 100,
        "validation_interval": 100,
        "checkpoint_interval": 400,
        "best_checkpoint_eval_metric": "accuracy",
        "optimizer_config": {"optimizer": "adam", "learning_rate": 5e-3, "schedule": "cosine"},
    }
    task = {"train_data": train, "validation_data": held_out}
    config = tk.ExperimentConfig(task=DistillationConfig())
    return config.replace(task=task, trainer=trainer, runtime={"random_seed": 1})
