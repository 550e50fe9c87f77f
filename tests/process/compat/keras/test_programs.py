"""Programs of Keras's guides end with the same bits if the process of one of their epochs is
killed.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.builders import read_json
from tests.fork_server import ForkServer
from tests.process.compat.keras.programs import PROGRAMS, STEPS, run_killed, run_to_the_end

THIRD_EPOCH = 2 * STEPS + 6
SECONDS = 200.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of all programs whole, and with a kill."""
    folder: Path = tmp_path_factory.mktemp("programs")
    with ForkServer() as server:
        for name in PROGRAMS:
            assert server.run(run_killed, name, folder, THIRD_EPOCH).code == -signal.SIGKILL
        # The killed programs first, in a new process.
        end = server.run(run_to_the_end, folder, timeout=SECONDS)
        assert end.code == 0, end.text
    return read_json(folder / "whole.json"), read_json(folder / "again.json")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_was_killed_ends_with_the_same_bits(results: Any, name: str) -> None:
    whole, again = results
    assert len(whole[name]["bits"]) > 8
    assert again[name] == whole[name]
