"""The speed, the stages and the values of data, without a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import training_data, write_records
from trainer_kit.errors import DataError
from trainer_kit.inputs.data_examination import (
    ORDER,
    find_example,
    iterate_tensors,
    measure_speed,
    measure_stages,
    summarize_batches,
)
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.inputs.sources.tfrecords import TFRecordSource

_EXAMPLES = 23
_SLEEP = 0.02


def _sleep(batch: Any) -> Any:
    def wait(values: np.ndarray) -> np.ndarray:
        time.sleep(_SLEEP)
        return values

    return tf.ensure_shape(tf.numpy_function(wait, [batch], batch.dtype), batch.shape)


def test_the_speed_is_that_of_the_elements_after_the_first() -> None:
    dataset = tf.data.Dataset.range(5).map(_sleep)

    speed = measure_speed(dataset, seconds=10.0)

    assert speed.first_seconds >= _SLEEP
    assert _SLEEP <= speed.mean_seconds < 10 * _SLEEP


def test_a_measurement_of_slow_data_ends_in_time() -> None:
    dataset = tf.data.Dataset.range(10_000).map(_sleep)
    begin = time.perf_counter()

    measure_speed(dataset, seconds=0.1)

    assert time.perf_counter() - begin < 5.0


def test_the_speed_of_a_single_batch_is_that_of_the_first() -> None:
    speed = measure_speed(tf.data.Dataset.range(1).map(_sleep), seconds=1.0)

    assert speed.mean_seconds == speed.first_seconds >= _SLEEP


def test_the_speed_of_no_data_is_an_error() -> None:
    with pytest.raises(DataError, match="the data has no batch"):
        measure_speed(tf.data.Dataset.range(0), seconds=1.0)


def test_the_slow_stage_of_tfrecords_is_found(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [b"%d" % number for number in range(_EXAMPLES)])
    source = TFRecordSource(
        str(tmp_path / "a"), training_data(), parse=_sleep, batch_transform=tf.strings.to_number
    )

    seconds = measure_stages(source.stages(0), seconds=0.2)

    assert [name.split()[0] for name in seconds] == ["read", "parse", "batch_transform"]
    # What a stage adds counts, not the stages before it.
    assert max(seconds, key=seconds.__getitem__).startswith("parse _sleep")
    assert max(seconds.values()) >= 0.5 * _SLEEP


def test_values_that_are_not_finite_have_a_place_and_an_example() -> None:
    features = np.arange(2 * _EXAMPLES, dtype=np.float32).reshape([_EXAMPLES, 2])
    features[17] = [np.nan, np.inf]
    labels = np.arange(_EXAMPLES, dtype=np.int32)
    params = training_data()
    source = ArraySource((features, labels), params)

    summaries = summarize_batches(source.at(0), batches=_EXAMPLES // params.global_batch_size + 1)

    summary = summaries["features"]
    assert (summary.lowest, summary.highest, summary.num_not_finite) == (0.0, 45.0, 2)
    assert summary.first_place is not None
    batch, row = summary.first_place
    position = batch * params.global_batch_size + row
    assert find_example(source.stages(0)[ORDER], position) == 17
    assert summaries["labels"].first_place is None


def test_tensors_are_named_by_their_place_in_a_batch() -> None:
    batch = ({"image": 1, "mask": 2}, 3)

    assert list(iterate_tensors(batch)) == [
        ("features/image", 1),
        ("features/mask", 2),
        ("labels", 3),
    ]
    assert list(iterate_tensors({"image": 1})) == [("image", 1)]
    assert list(iterate_tensors(7)) == [("features", 7)]


def test_texts_have_no_range() -> None:
    dataset = tf.data.Dataset.from_tensors({"name": tf.constant(["a"]), "size": tf.constant([2])})

    summaries = summarize_batches(dataset, batches=1)

    assert not summaries["name"].is_number
    assert (summaries["size"].lowest, summaries["size"].highest) == (2.0, 2.0)
