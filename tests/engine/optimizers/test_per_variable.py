"""Values for each variable, and the paths that a pattern without a match was meant for."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from trainer_kit.optimizers.per_variable import PerVariable, similar_paths, variable_path

PATHS = ["net/encoder_0/kernel", "net/encoder_1/kernel", "net/head/bias"]


def test_a_value_is_found_by_its_variable() -> None:
    variables = [keras.Variable(1.0), tf.Variable(2.0)]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)
    values = PerVariable(("first", "second"))
    assert [values.of(optimizer, variable) for variable in (*variables, variables[0].value)] == [
        "first",
        "second",
        "first",
    ]


def test_a_variable_of_tensorflow_has_its_name_as_path() -> None:
    assert variable_path(tf.Variable(1.0, name="a/b")) == "a/b"
    assert variable_path(keras.Variable(1.0, name="b")) == "b"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("encodr_1/", PATHS[:2]),
        ("^net/hed/bias$", PATHS[2:]),
        ("Head", PATHS[2:]),
        ("quite else", PATHS),
    ],
)
def test_similar_paths_are_near_the_pattern(pattern: str, found: list[str]) -> None:
    assert similar_paths(pattern, PATHS) == found
