"""What the tests of the door share: processes in which Model Garden is imported already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.model_garden_table import DOOR, THEIRS
from trainer_kit.testing import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts processes."""
    with ForkServer(needs=[*THEIRS, *DOOR]) as started:
        yield started
