"""trainer.freeze: variables that training leaves as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import seeded_trainer
from tests.engine.linear_task import linear_experiment
from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.checkpoints.weight_files.tensorflow_file import TensorFlowFile
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.trained_variables import freeze
from trainer_kit.training.trainer import Trainer

RATE = {"type": "constant", "constant": {"learning_rate": 0.05}}
SGD = {"optimizer": {"type": "sgd"}, "learning_rate": RATE}
ADAMW = {"optimizer": {"type": "adamw", "adamw": {"weight_decay_rate": 0.1}}, "learning_rate": RATE}
BODY = ("/dense/", "/batch_normalization/")
FROZEN = slice(0, 6)
TRAINED = slice(6, None)  # of the weights


class Normalized(TinyTask):
    def build_model(self) -> keras.Model:
        layers = [
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
        return keras.Sequential([keras.Input((8,)), *layers])


@pytest.fixture(autouse=True)
def new_names() -> None:
    """Numbers the layers of the models of each test from the beginning."""
    keras.utils.clear_session()


def _create_trainer(count: int = 1, **trainer: Any) -> Trainer:
    config = tiny_experiment(**{"optimizer_config": ADAMW, "freeze": BODY, **trainer})
    config = config.replace(task={"train_data": {"global_batch_size": 16}})
    return seeded_trainer(config, Normalized, count, evaluate=False)


def _are_equal(before: Any, after: Any, which: slice) -> list[bool]:
    return [np.array_equal(a, b) for a, b in zip(before[which], after[which], strict=True)]


def test_frozen_weights_keep_their_bits_and_have_no_slots() -> None:
    trainer = _create_trainer(2, optimizer_config={**ADAMW, "ema": {}})
    before = trainer.model.get_weights()

    trainer.train(tf.constant(20))
    after = trainer.model.get_weights()

    assert all(_are_equal(before, after, FROZEN))
    assert not any(_are_equal(before, after, TRAINED))

    kept = ["sequential/dense_1/kernel", "sequential/dense_1/bias"]
    items = trainer.state.checkpoint

    assert sorted(items.average) == sorted(kept)

    slots = {name.partition("/")[2].rpartition("/")[0] for name in items.optimizer}
    assert {name for name in slots if name} == set(kept)


def test_without_freeze_the_names_of_slots_are_the_same() -> None:
    some, all_of_them = (
        _create_trainer(freeze=freeze).state.checkpoint.optimizer for freeze in (BODY, ())
    )

    assert set(some) < set(all_of_them)


def test_a_part_of_a_layer_is_frozen_alone() -> None:
    trainer = _create_trainer(optimizer_config=SGD, freeze=("kernel", "gamma"))
    before = trainer.model.get_weights()
    trainer.train(tf.constant(5))
    kept = _are_equal(before, trainer.model.get_weights(), slice(None))
    frozen = [
        variable.name for variable, same in zip(trainer.model.weights, kept, strict=True) if same
    ]

    assert frozen == ["kernel", "gamma", "kernel"]  # not moving_mean


def test_named_optimizers_share_what_is_left() -> None:
    sgd = {"optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}}, "learning_rate": RATE}
    several = {
        "head": {**ADAMW, "variables": ("/dense_1/kernel",)},
        "rest": {**sgd, "variables": (".",), "ema": {}},
    }
    trainer = _create_trainer(optimizer_config={}, optimizers=several)
    before = trainer.model.get_weights()

    trainer.train(tf.constant(5))
    after = trainer.model.get_weights()

    assert all(_are_equal(before, after, FROZEN))
    assert not any(_are_equal(before, after, TRAINED))
    assert sorted(trainer.state.checkpoint.average) == ["sequential/dense_1/bias"]

    with pytest.raises(
        UsageError, match=r"no variable matches /dense/.*not trainable: see trainer.freeze"
    ):
        _create_trainer(
            optimizer_config={}, optimizers={**several, "none": {**sgd, "variables": ("/dense/",)}}
        )


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ("dnese",),
            "no variable of the model matches 'dnese'; similar ones are: sequential/dense/",
        ),
        ((".",), "all trainable variables"),
        (
            ("moving_mean",),
            "the statistics sequential/batch_normalization/moving_mean could change",
        ),
    ],
)
def test_patterns_that_match_nothing_or_all_are_errors(
    patterns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _create_trainer(freeze=patterns)


def test_of_keras_two_whole_layers_are_frozen() -> None:
    layers = [tf_keras.layers.Dense(2, name="one"), tf_keras.layers.Dense(2, name="two")]
    model = tf_keras.Sequential([tf_keras.Input((2,)), *layers])

    assert len(freeze(model, ("^one/",))) == 4
    assert [variable.name for variable in model.trainable_variables] == [
        "two/kernel:0",
        "two/bias:0",
    ]

    with pytest.raises(
        UsageError, match="two/bias of a Sequential cannot be frozen by itself; only whole layers"
    ):
        freeze(model, ("two/bias",))


def test_numbers_in_the_names_of_layers_are_those_given() -> None:
    layers = [
        keras.layers.Dense(2, name=name) for name in ("encoder", "stage_1", "stage_2", "stage_3")
    ]

    freeze(keras.Sequential([keras.Input((2,)), *layers]), ["stage_1"])

    assert [layer.name for layer in layers if not layer.trainable] == ["stage_1"]


def test_a_resume_with_another_freeze_says_what_it_means(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    config = linear_experiment(train_steps=10, freeze=("/bias",))
    launch(config, "train", folder)
    other = config.replace(trainer={"train_steps": 20, "freeze": ("/kernel",)})

    with pytest.raises(ConfigError, match=r"trainer.freeze: was \['/bias'\] when this run began"):
        launch(other, "train", folder)

    launch(
        other, "train", folder, allow_config_change=["trainer.freeze"], allow_partial_restore=True
    )
    before, after = (TensorFlowFile(f"{folder}/ckpt-{step}") for step in (10, 20))
    names = ("model/sequential/dense/bias", "model/sequential/dense/kernel")

    assert [
        np.array_equal(before.read_tensor(name), after.read_tensor(name)) for name in names
    ] == [False, True]


def test_averages_of_variables_trained_again_begin_at_them(tmp_path: Path) -> None:
    averaged = {**SGD, "ema": {"more_decays": {"fast": 0.5}}}
    old = _create_trainer(optimizer_config=averaged)
    # Not those that the next one begins with.
    old.model.set_weights([value + 1 for value in old.model.get_weights()])
    old.train(tf.constant(5))
    path = old.checkpoint.write(str(tmp_path / "ckpt-5"))
    new = _create_trainer(optimizer_config=averaged, freeze=())
    restore(new.checkpoint, path, strict=True, allow_partial=True)
    new.after_restore(path)
    state = new.state.checkpoint
    kernel = old.model.get_weights()[0]

    for averages in (state.average, state.more_averages["fast"]):
        np.testing.assert_array_equal(averages["sequential/dense/kernel"].numpy(), kernel)

    for name, average in old.state.checkpoint.average.items():
        np.testing.assert_array_equal(state.average[name].numpy(), average.numpy())
