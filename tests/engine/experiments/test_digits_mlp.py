"""The experiment `digits_mlp`, on its real images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import trainer_kit
from experiments.digits_mlp import DigitsMlpConfig, digits_mlp
from experiments.digits_mlp.task import DigitsMlpTask, split_digits
from trainer_kit.config.experiments import task_class
from trainer_kit.run.launcher import launch


def test_the_parts_hold_every_image_once() -> None:
    (pixels, labels), (held_out, held_out_labels) = split_digits()
    assert (len(pixels), len(held_out)) == (1437, 360)
    data = load_digits()
    given = sorted((*row, label) for row, label in zip((data.data / 16).tolist(), data.target, strict=True))
    both = zip([*pixels.tolist(), *held_out.tolist()], [*labels, *held_out_labels], strict=True)
    assert sorted((*row, label) for row, label in both) == given
    assert not {row.tobytes() for row in pixels} & {row.tobytes() for row in held_out}


def test_the_split_is_always_the_same_one() -> None:
    (_, labels), (_, held_out) = split_digits()
    assert labels[:10].tolist() == [3, 9, 1, 3, 1, 9, 4, 4, 2, 8]
    assert held_out[:10].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3]


def test_pixels_have_the_shape_and_the_range_that_the_net_takes() -> None:
    for pixels, labels in split_digits():
        assert pixels.shape[1:] == (64,)
        assert (pixels.dtype, labels.dtype) == (np.float32, np.int32)
        assert (pixels.min(), pixels.max()) == (0, 1)


def test_the_net_is_64_32_10_without_dropout() -> None:
    assert task_class(DigitsMlpConfig()) is DigitsMlpTask
    task = DigitsMlpTask(digits_mlp().task)
    model = task.build_model()
    assert model.count_params() == (64 * 32 + 32) + (32 * 10 + 10)
    batch = split_digits()[1][0][:8]
    assert np.array_equal(model(batch, training=True), model(batch, training=False))


def test_dropout_can_be_asked_for() -> None:
    model = DigitsMlpTask(digits_mlp(hidden=16, dropout=0.5).task).build_model()
    assert model.count_params() == (64 * 16 + 16) + (16 * 10 + 10)
    batch = split_digits()[1][0][:8]
    assert not np.array_equal(model(batch, training=True), model(batch, training=False))


def test_a_few_steps_already_learn(tmp_path: Path) -> None:
    short = {"train_steps": 100, "steps_per_loop": 50, "summary_interval": 50}
    config = trainer_kit.get_experiment("digits_mlp").replace(trainer=short)
    _, logs = launch(config, "train_and_eval", str(tmp_path))
    assert logs["accuracy"] > 0.6  # by chance: 0.1
    assert logs["validation_loss"] < 1.8  # by chance: 2.3
