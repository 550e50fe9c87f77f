"""What the tests of several tasks share: their data."""

from __future__ import annotations

import pytest

from tests.engine.compat.model_garden.tiny import multi_task


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the data."""
    folder = tmp_path_factory.mktemp("data")
    multi_task.write(folder)
    return str(folder)
