"""The record of gin's bindings, beside Model Garden's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gin
import pytest
from official.core import train_utils

from trainer_kit.compat.model_garden.files.gin_record import save_gin_config


@gin.configurable(module="tests.gin_record")
def _width(number: int = 1) -> int:
    return number


@pytest.fixture(autouse=True)
def clean_gin() -> Iterator[None]:
    yield
    gin.clear_config()  # which unlocks it


def test_the_bindings_that_were_used_are_in_the_same_file_as_theirs(tmp_path: Path) -> None:
    gin.parse_config("tests.gin_record._width.number = 12")
    assert _width() == 12
    save_gin_config("train", str(tmp_path / "ours"))
    train_utils.save_gin_config("train", str(tmp_path / "theirs"))
    ours, theirs = ((tmp_path / name / "operative_config.train.gin").read_bytes() for name in ("ours", "theirs"))
    assert ours == theirs
    assert b"_width.number = 12" in ours
