"""What is a single number and what is none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.telemetry.scalars import (
    as_scalar,
    flatten_scalars,
    from_json_number,
    to_json_number,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (np.array(3.5), 3.5),
        (np.bool_(False), 0.0),
        (float("inf"), float("inf")),
    ],
)
def test_a_number_is_a_scalar(value: object, expected: float) -> None:
    assert as_scalar(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "1.5",
        b"1.5",
        np.str_("1.5"),
        np.array("1.5"),
        None,
        {"a": 1.0},
        object(),
        1j,
        np.complex64(1j),
        10**400,
        [1.0],
        np.array([1.0]),
        np.zeros((2, 2)),
        np.datetime64("2020-01-01"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_single_number_is_no_scalar(value: object) -> None:
    assert as_scalar(value) is None


def test_tensors_count_like_arrays() -> None:
    values = [
        tf.constant(2, tf.int64),
        tf.constant(0.5, tf.bfloat16),
        tf.Variable(3.0),
        tf.constant(True),
    ]

    assert [as_scalar(value) for value in values] == [2.0, 0.5, 3.0, 1.0]
    assert as_scalar(tf.constant([1.0])) is None
    assert as_scalar(tf.constant("1.5")) is None
    assert as_scalar(tf.constant(1j)) is None


def test_bfloat16_is_a_scalar() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert as_scalar(ml_dtypes.bfloat16(1.5)) == 1.5


def test_flat_scalars_joins_names_and_drops_the_rest() -> None:
    metrics = {
        "loss": np.float32(0.5),
        "digits": {"accuracy": 1, "deep": {"n": 2.0}},
        "image": np.zeros(3),
        "note": "x",
    }

    assert flatten_scalars(metrics) == {"loss": 0.5, "digits/accuracy": 1.0, "digits/deep/n": 2.0}
    assert list(flatten_scalars({"b": 1, "a": 2})) == ["b", "a"]
    assert flatten_scalars(metrics, "|") == {
        "loss": 0.5,
        "digits|accuracy": 1.0,
        "digits|deep|n": 2.0,
    }


@pytest.mark.parametrize("value", [0.0, -1.5, 1e300, 5e-324, math.inf, -math.inf, math.nan, 7])
def test_a_number_survives_strict_json(value: float) -> None:
    text = json.dumps(to_json_number(value), allow_nan=False)
    back = from_json_number(json.loads(text))

    assert back == value or (math.isnan(back) and math.isnan(value))
    assert isinstance(back, float)


@pytest.mark.parametrize("value", [None, "text", [1.0], {}, 10**400])
def test_what_json_holds_instead_of_a_number_is_read_as_nan(value: object) -> None:
    assert math.isnan(from_json_number(value))
