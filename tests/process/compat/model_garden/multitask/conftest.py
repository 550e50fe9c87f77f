"""What the tests of several tasks share: their data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.compat.model_garden.tiny import multi_task


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the data, which the registered experiments know."""
    folder = tmp_path_factory.mktemp("data")
    multi_task.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_DATA", str(folder))
        yield folder
