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
    measure_seconds,
    measure_stages,
    summarize_batches,
)
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

    assert _SLEEP <= measure_seconds(dataset, limit=10.0) < 10 * _SLEEP


def test_a_measurement_of_slow_data_ends_in_time() -> None:
    dataset = tf.data.Dataset.range(10_000).map(_sleep)
    begin = time.perf_counter()

    measure_seconds(dataset, limit=0.1)

    assert time.perf_counter() - begin < 5.0


@pytest.mark.parametrize("batches", [0, 1])
def test_the_speed_of_less_than_two_batches_is_an_error(batches: int) -> None:
    with pytest.raises(DataError, match="the data has fewer than two batches"):
        measure_seconds(tf.data.Dataset.range(batches), limit=1.0)


def test_the_slow_stage_of_tfrecords_is_found(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [b"%d" % number for number in range(_EXAMPLES)])
    source = TFRecordSource(
        str(tmp_path / "a"), training_data(), parse=_sleep, batch_transform=tf.strings.to_number
    )

    seconds = measure_stages(source.stages(0), limit=0.2)

    assert [name.split()[0] for name in seconds] == ["read", "parse", "batch_transform"]
    # What a stage adds counts, not the stages before it.
    assert max(seconds, key=seconds.__getitem__).startswith("parse _sleep")
    assert max(seconds.values()) >= 0.5 * _SLEEP


def test_values_that_are_not_finite_have_a_place() -> None:
    features = np.arange(2 * _EXAMPLES, dtype=np.float32).reshape([_EXAMPLES, 2])
    features[17] = [np.nan, np.inf]
    labels = np.arange(_EXAMPLES, dtype=np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(5)

    summaries = summarize_batches(dataset, batches=10)

    summary = summaries["batch/0"]
    assert summary.description == "float32 (5, 2)"
    assert (summary.lowest, summary.highest) == (0.0, 45.0)
    assert summary.bad_place == "row 2 of batch 3"
    assert summaries["batch/1"].bad_place == ""


def test_tensors_have_names_and_texts_have_no_range() -> None:
    batch = ({"image": tf.constant([2]), "name": tf.constant(["a"])}, 3)

    summaries = summarize_batches(tf.data.Dataset.from_tensors(batch), batches=1)

    assert list(summaries) == ["batch/0/image", "batch/0/name", "batch/1"]
    assert (summaries["batch/0/image"].lowest, summaries["batch/0/image"].highest) == (2.0, 2.0)
    assert summaries["batch/0/name"].lowest > summaries["batch/0/name"].highest


def test_a_number_that_is_not_finite_has_a_place() -> None:
    dataset = tf.data.Dataset.from_tensors((np.float32(np.nan), None))

    (summary,) = summarize_batches(dataset, 1).values()

    assert summary.bad_place == "row 0 of batch 0"


def test_a_tensor_that_is_not_examined_says_so() -> None:
    ragged = tf.ragged.constant([[1.0], [np.nan, 2.0]])
    dataset = tf.data.Dataset.from_tensors(ragged)

    (summary,) = summarize_batches(dataset, 1).values()

    assert summary.description == "float32 (2, None), not examined"
