"""Programs of Keras's guides have the history of Keras, and end with the same bits if an epoch of them is killed."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest

from tests.fork_server import ForkServer
from tests.process.compat.keras.doors import run_killed, run_to_the_end
from tests.process.compat.keras.programs import PROGRAMS, STEPS

THIRD_EPOCH = 2 * STEPS + 6
SECONDS = 200.0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all programs: of Keras, of trainer_kit, and of trainer_kit with a kill."""
    folder = tmp_path_factory.mktemp("programs")
    with ForkServer() as server:
        for name in PROGRAMS:
            assert server.run(run_killed, name, folder, THIRD_EPOCH).code == -signal.SIGKILL
        end = server.run(run_to_the_end, folder, timeout=SECONDS)  # the killed ones first, in a new process
        assert end.code == 0, end.text
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("keras", "whole", "again")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_history_of_keras(results: dict[str, Any], name: str) -> None:
    expected, found = results["keras"][name], results["whole"][name]
    assert found["epoch"] == expected["epoch"]
    assert list(found["history"]) == list(expected["history"])
    for log, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][log], values, rtol=1e-6, atol=1e-6, err_msg=log)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_was_killed_ends_with_the_same_bits(results: dict[str, Any], name: str) -> None:
    assert results["again"][name] == results["whole"][name]
