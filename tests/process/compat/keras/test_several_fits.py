"""A program of several fits that is killed in the middle ends as one that was never killed:
finished fits count.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.process.compat.keras.several_fits import STEPS, run_killed, run_to_the_end

LAST_FIT = 3
STEP = STEPS + 2  # a checkpoint is saved after step 6


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What a program has left that was never killed, and one that was killed in its last fit."""
    whole = str(tmp_path_factory.mktemp("whole"))
    killed = str(tmp_path_factory.mktemp("killed"))
    with ForkServer() as server:
        assert server.run(run_killed, killed, LAST_FIT, STEP).code == -signal.SIGKILL
        end = server.run(run_to_the_end, killed, whole)  # the killed one first, in a new process
    assert end.code == 0, end.text
    killed_output, whole_output = json.loads(end.text.splitlines()[-1])
    return whole_output, killed_output


def test_fits_with_the_same_data_end_with_the_same_bits(results: tuple[Any, Any]) -> None:
    whole, killed = results
    assert killed["weights"] == whole["weights"]


def test_a_finished_fit_leaves_the_rate_of_on_train_end(results: tuple[Any, Any]) -> None:
    whole, killed = results
    assert killed["rate"] == whole["rate"] == pytest.approx(1e-2)


def test_a_callback_of_a_finished_fit_has_its_attributes(results: tuple[Any, Any]) -> None:
    whole, killed = results
    for name in ("losses", "mean", "rate"):
        assert killed[name] == whole[name]
    assert len(killed["losses"]) == 8
