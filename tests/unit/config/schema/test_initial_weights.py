"""The config of initial weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import apply_values, nest_value
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.config.schema.initial_weights import InitCheckpointConfig

ENTRY = {"path": "a", "exclude": ["head"]}
SECTION = (InitCheckpointConfig(path="a", exclude=("head",)),)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(["a"], "a"), ([[ENTRY], "a"], "a"), ([[ENTRY]], SECTION), (["a", [ENTRY]], SECTION)],
)
def test_a_path_and_a_list_of_sections_are_both_allowed(
    layers: list[Any], expected: object
) -> None:
    resolved = apply_values(
        ExperimentConfig(), *(nest_value("task.init_checkpoint", layer) for layer in layers)
    )

    assert resolved.config.task.init_checkpoint == expected


def test_a_list_of_sections_may_be_made_in_python() -> None:
    assert TaskConfig(init_checkpoint=[ENTRY]).init_checkpoint == SECTION  # type: ignore[list-item]
