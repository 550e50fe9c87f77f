"""The experiment `digits`, on its real images."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

import trainer_kit
from experiments.digits import DigitsConfig, digits
from experiments.digits.task import DigitsTask, split_digits
from trainer_kit.config.experiments import task_class
from trainer_kit.run.launcher import launch


def test_the_parts_hold_every_image_once() -> None:
    (images, labels), (held_out, held_out_labels) = split_digits()
    assert (len(images), len(labels), len(held_out), len(held_out_labels)) == (1437, 1437, 360, 360)
    data = load_digits()
    given = sorted((*image.ravel().tolist(), label) for image, label in zip(data.images / 16, data.target, strict=True))
    both = zip([*images, *held_out], [*labels, *held_out_labels], strict=True)
    assert sorted((*image.ravel().tolist(), label) for image, label in both) == given


def test_no_image_is_in_both_parts() -> None:
    (images, _), (held_out, _) = split_digits()
    assert not {image.tobytes() for image in images} & {image.tobytes() for image in held_out}


def test_the_split_is_always_the_same_one() -> None:
    (_, labels), (_, held_out) = split_digits()
    assert labels[:10].tolist() == [3, 9, 1, 3, 1, 9, 4, 4, 2, 8]
    assert held_out[:10].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3]


def test_images_have_the_shape_and_the_range_that_the_net_takes() -> None:
    for images, labels in split_digits():
        assert images.shape[1:] == (8, 8, 1)
        assert (images.dtype, labels.dtype) == (np.float32, np.int32)
        assert (images.min(), images.max()) == (0, 1)


def test_every_digit_has_the_same_share_in_both_parts() -> None:
    (_, labels), (_, held_out) = split_digits()
    shares = np.bincount(labels) / 1437 - np.bincount(held_out) / 360
    assert np.abs(shares).max() < 0.003


def test_the_net_is_as_its_config_says() -> None:
    assert task_class(DigitsConfig()) is DigitsTask
    model = DigitsTask(digits(width=4, dropout=0.2).task).build_model()
    assert model.count_params() == (9 * 4 + 4) + (9 * 4 * 8 + 8) + (9 * 8 * 8 + 8) + (4 * 4 * 8 * 10 + 10)
    assert [layer.rate for layer in model.layers if "dropout" in layer.name] == [0.2]
    assert model.output_shape == (None, 10)


def test_a_longer_run_gets_a_longer_schedule() -> None:
    config = digits(train_steps=300, learning_rate=0.01).trainer
    cosine = config.optimizer_config.learning_rate.get()
    assert (config.train_steps, cosine.decay_steps, cosine.initial_learning_rate) == (300, 300, 0.01)
    assert cosine.alpha > 0  # a run that is made longer by train_steps alone still learns


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics after 40 steps."""
    short = {"train_steps": 40, "steps_per_loop": 20, "summary_interval": 20, "validation_interval": 40}
    config = trainer_kit.get_experiment("digits").replace(trainer=short)
    _, logs = launch(config, "train_and_eval", str(tmp_path_factory.mktemp("digits")))
    return logs


def test_a_few_steps_already_learn(logs: dict[str, float]) -> None:
    assert logs["accuracy"] > 0.5  # by chance: 0.1
    assert logs["validation_loss"] < 1.5  # by chance: 2.3
