"""Programs of Keras's guides have the history of Keras, and five that are killed in an epoch end with the same bits."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest

from tests.process.compat.keras.doors import run_killed, run_with_keras, run_with_trainer_kit
from tests.process.compat.keras.programs import KILLED, PROGRAMS, STEPS
from trainer_kit.testing import ForkServer

THIRD_EPOCH = 2 * STEPS + 6
SECONDS = 200.0


def ended(server: ForkServer, *run: Any) -> Any:
    """Runs programs to their end, and returns their results."""
    end = server.run(*run, timeout=SECONDS)
    assert end.code == 0, end.text
    return json.loads(run[-1].read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all programs: of Keras, of trainer_kit, and, of some, of trainer_kit with a kill."""
    folder = tmp_path_factory.mktemp("programs")
    with ForkServer() as server:
        whole = server.start(run_with_trainer_kit, [*PROGRAMS], folder / "whole", folder / "whole.json")
        of_keras = ended(server, run_with_keras, folder / "keras.json")
        for name in KILLED:
            assert server.run(run_killed, name, folder / "again", THIRD_EPOCH).code == -signal.SIGKILL
        again = ended(server, run_with_trainer_kit, KILLED, folder / "again", folder / "again.json")
        end = whole.wait(SECONDS)
        assert end.code == 0, end.text
    return {"keras": of_keras, "whole": json.loads((folder / "whole.json").read_text()), "again": again}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_history_of_keras(results: dict[str, Any], name: str) -> None:
    expected, found = results["keras"][name], results["whole"][name]
    assert found["epoch"] == expected["epoch"]
    assert list(found["history"]) == list(expected["history"])
    for log, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][log], values, rtol=1e-6, atol=1e-6, err_msg=log)


@pytest.mark.parametrize("name", KILLED)
def test_a_program_that_was_killed_ends_with_the_same_bits(results: dict[str, Any], name: str) -> None:
    assert results["again"][name] == results["whole"][name]
