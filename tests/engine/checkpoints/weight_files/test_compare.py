"""Differences between two files of weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.checkpoints.weight_files.compare import common_names, compare_weights
from trainer_kit.checkpoints.weight_files.tensorflow_file import TensorFlowFile

_BFLOAT16 = tf.bfloat16.as_numpy_dtype


def _write_file(path: Path, **values: object) -> TensorFlowFile:
    variables = {name: tf.Variable(value) for name, value in values.items()}
    return TensorFlowFile(tf.train.Checkpoint(**variables).write(str(path)))


@pytest.mark.parametrize(
    ("value", "other", "detail"),
    [
        (np.int64(2**62), np.int64(2**62 + 1), "1 of 1 values, by at most 1"),
        (np.uint8([1, 2]), np.uint8([2, 0]), "2 of 2 values, by at most 2"),
        (np.complex64(1 + 1j), np.complex64(1 + 5j), "1 of 1 values, by at most 4"),
        (np.float32([np.nan, 1, 2]), np.float32([np.nan, 1, 2.5]), "1 of 3 values, by at most 0.5"),
        (np.float32([np.nan, 1]), np.float32([2, 1]), "1 of 2 values, by at most nan"),
        (np.array([1, 2], _BFLOAT16), np.array([1, 4], _BFLOAT16), "1 of 2 values, by at most 2"),
        (np.bool_([True, False]), np.bool_([True, True]), "1 of 2 values, by at most 1"),
        ("one", "two", "text"),
    ],
)
def test_values_are_compared_in_their_dtype(
    value: object, other: object, detail: str, tmp_path: Path
) -> None:
    rows, equal = compare_weights(
        _write_file(tmp_path / "one", x=value, y=1.0),
        _write_file(tmp_path / "other", x=other, y=1.0),
    )

    assert rows == [["x", "of another value", detail]]
    assert equal == 1


def test_nan_is_equal_to_nan(tmp_path: Path) -> None:
    first, second = (
        _write_file(tmp_path / name, x=np.float32([np.nan, np.inf])) for name in ("one", "other")
    )

    assert compare_weights(first, second) == ([], 1)


def test_equal_names_go_before_the_order_of_layers(tmp_path: Path) -> None:
    first = _write_file(tmp_path / "one", stage_1=1.0, stage_2=2.0)
    second = _write_file(tmp_path / "other", stage_2=2.0, stage_3=3.0)

    rows, _ = compare_weights(first, second)

    assert [name for name, _, _ in rows] == ["stage_1", "stage_3"]

    numbered = _write_file(tmp_path / "two", fc=1.0, fc_1=2.0)
    later = _write_file(tmp_path / "three", fc_7=1.0, fc_8=2.0)

    assert common_names(numbered, later)[1] == {"fc": "fc_7", "fc_1": "fc_8"}
    assert compare_weights(numbered, later) == ([], 2)
