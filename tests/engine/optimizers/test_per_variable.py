"""Values for each variable, and the paths that a pattern without a match was meant for."""

from __future__ import annotations

import pytest

from trainer_kit.optimizers.per_variable import similar_paths

PATHS = ["net/encoder_0/kernel", "net/encoder_1/kernel", "net/head/bias"]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("encodr_1/", PATHS[:2]),
        ("^net/hed/bias$", PATHS[2:]),
        ("Head", PATHS[2:]),
        ("quite else", PATHS),
    ],
)
def test_similar_paths_are_near_the_pattern(pattern: str, paths: list[str]) -> None:
    assert similar_paths(pattern, PATHS) == paths
