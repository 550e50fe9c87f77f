"""The length of an epoch, by what the data tells of itself."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

import pytest
import tensorflow as tf

from tests.builders import input_context, training_data
from trainer_kit import ArraySource
from trainer_kit.errors import ConfigError
from trainer_kit.inputs.epoch_length import compute_epoch_length
from trainer_kit.testing.tiny_task import tiny_arrays


def test_a_source_counts_examples_and_a_dataset_batches() -> None:
    source = ArraySource(tiny_arrays(True), training_data(10))

    assert compute_epoch_length(source, 10) == Fraction(103, 10)

    dataset = tf.data.Dataset.range(103).batch(10)
    assert compute_epoch_length(dataset, 10) == 11

    two = input_context(2)
    # Each element is the batch of one replica.
    assert compute_epoch_length(dataset, 10, two) == Fraction(11, 2)


def test_a_dataset_of_unknown_length_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trainer_kit")
    odd = tf.data.Dataset.range(20).filter(lambda number: number % 2 == 1).batch(3)

    assert compute_epoch_length(odd, 3) == 4
    assert (
        "read once to count the batches of an epoch: 4; set trainer.steps_per_epoch" in caplog.text
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tf.data.Dataset.range(3).repeat(), "task.train_data has no end"),
        (
            lambda: tf.data.Dataset.range(3).repeat().filter(lambda number: number > 0),
            "task.train_data has no end",
        ),
        (lambda: tf.data.Dataset.range(0), "task.train_data has no batch"),
        (lambda: None, "the config has no task.train_data"),
        (
            type("Endless", (), {"at": lambda self, position, input_context=None: None}),
            "Endless does not tell it",
        ),
    ],
)
def test_data_that_does_not_tell_needs_the_setting(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compute_epoch_length(make(), 1, required_by="trainer.train_steps")

    text = str(caught.value)
    assert text.startswith("trainer.train_steps: needs the length of an epoch")
    assert reason in text
    assert "set trainer.steps_per_epoch" in text
