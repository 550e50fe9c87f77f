"""Which code is the user's, by its module."""

from __future__ import annotations

import pytest

from trainer_kit.errors.user_frames import is_framework


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("tensorflow.python.ops.math_ops", True),
        ("keras.src.layers", True),
        ("trainer_kit.training.task", True),
        ("json.decoder", True),
        ("__main__", False),
        ("my_project.tasks", False),
        (None, False),
    ],
)
def test_frameworks_are_told_by_the_first_part_of_a_module(module: str | None, expected: bool) -> None:
    assert is_framework(module) is expected
