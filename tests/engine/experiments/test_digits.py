"""The experiments `digits`, `digits_mlp` and `digits_tasks`, on their real images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_digits

import trainer_kit
from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.experiments.digits import DigitsConfig, digits
from trainer_kit.experiments.digits import task as digits_task
from trainer_kit.experiments.digits_mlp import DigitsMlpConfig, digits_mlp
from trainer_kit.experiments.digits_mlp import task as digits_mlp_task
from trainer_kit.experiments.digits_tasks import digits_tasks
from trainer_kit.run.launcher import launch


@pytest.mark.parametrize(
    ("module", "shape"),
    [(digits_task, (8, 8, 1)), (digits_mlp_task, (64,))],
    ids=["digits", "digits_mlp"],
)
def test_the_parts_have_every_image_in_one_of_them(module: Any, shape: tuple[int, ...]) -> None:
    (images, labels), (held_out, held_out_labels) = module.split_digits()

    assert images.shape == (1437, *shape)
    assert held_out.shape == (360, *shape)
    # The split is always the same one.
    assert labels[:10].tolist() == [3, 9, 1, 3, 1, 9, 4, 4, 2, 8]

    data = load_digits()
    expected = sorted(
        (*row.tolist(), label) for row, label in zip(data.data / 16, data.target, strict=True)
    )
    both = zip([*images, *held_out], [*labels, *held_out_labels], strict=True)

    assert sorted((*image.ravel().tolist(), label) for image, label in both) == expected


def test_the_net_of_digits_is_as_its_config_says() -> None:
    assert lookup_task_class(DigitsConfig()) is digits_task.DigitsTask

    model = digits_task.DigitsTask(digits(width=4, dropout=0.2).task).build_model()
    assert model.count_params() == (9 * 4 + 4) + (9 * 4 * 8 + 8) + (9 * 8 * 8 + 8) + (
        4 * 4 * 8 * 10 + 10
    )
    assert [layer.rate for layer in model.layers if "dropout" in layer.name] == [0.2]
    assert model.output_shape == (None, 10)


def test_the_net_of_digits_mlp_is_as_its_config_says() -> None:
    assert lookup_task_class(DigitsMlpConfig()) is digits_mlp_task.DigitsMlpTask

    model = digits_mlp_task.DigitsMlpTask(digits_mlp(hidden=16, dropout=0.5).task).build_model()
    assert model.count_params() == (64 * 16 + 16) + (16 * 10 + 10)
    assert [layer.rate for layer in model.layers if "dropout" in layer.name] == [0.5]


def test_a_longer_run_of_digits_gets_a_longer_schedule() -> None:
    config = digits(train_steps=300, learning_rate=0.01).trainer
    cosine = config.optimizer_config.learning_rate.get()

    assert config.train_steps == 300
    assert cosine.decay_steps == 300
    assert cosine.initial_learning_rate == 0.01
    assert cosine.alpha > 0  # a run that is made longer by train_steps alone still learns


@pytest.mark.parametrize(
    ("name", "steps", "accuracy", "loss"), [("digits", 40, 0.5, 1.5), ("digits_mlp", 100, 0.6, 1.8)]
)
def test_a_few_steps_already_learn(
    name: str, steps: int, accuracy: float, loss: float, tmp_path: Path
) -> None:
    short = {
        "train_steps": steps,
        "steps_per_loop": 20,
        "summary_interval": 20,
        "validation_interval": steps,
    }
    _, logs = launch(
        trainer_kit.get_experiment(name).replace(trainer=short), "train_and_eval", str(tmp_path)
    )

    assert logs["accuracy"] > accuracy
    assert logs["validation_loss"] < loss


def test_a_short_run_of_digits_tasks_learns_both_tasks(tmp_path: Path) -> None:
    short = {"train_steps": 100, "steps_per_loop": 100, "summary_interval": 100}
    _, logs = launch(digits_tasks().replace(trainer=short), "train_and_eval", str(tmp_path))

    # By chance: 0.1 and 0.5.
    assert logs["digit"]["accuracy"] > 0.7
    assert logs["parity"]["accuracy"] > 0.7
    assert (tmp_path / "best_checkpoints" / "parity" / "info.json").is_file()
