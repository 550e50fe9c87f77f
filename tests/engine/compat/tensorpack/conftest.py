"""Puts the thread back in eager mode after each test of the door for Tensorpack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tensorpack_state import reset_tensorpack


@pytest.fixture(autouse=True)
def program_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test is a program: an own default graph, logger directory and working directory."""
    monkeypatch.chdir(tmp_path)
    reset_tensorpack()

    yield

    reset_tensorpack()
