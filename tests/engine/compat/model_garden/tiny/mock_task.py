"""The mock task of official.utils.testing: one dense layer on zeros, no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import official.utils.testing.mock_task  # noqa: F401 -- registers "mock"

from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, cut, optimizer, trainer


def write(folder: Path) -> None:
    """Nothing: the data are made in the task."""


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """The validation data never end, so the number of steps is given."""
    del folder
    return cut("mock", {}, trainer(steps_per_loop, validation_steps=3, optimizer_config=optimizer("sgd", 0.01)))
