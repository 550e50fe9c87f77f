"""A race of real processes, which sleep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.benchmarks.race import race
from scripts.benchmarks.results import Contender, Section
from tests.fork_server import ForkServer

SLEEP = "tests.process.scripts.sleepers:sleep"
TICK = "tests.process.scripts.sleepers:tick"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


def test_a_race_has_readings_of_each_round_and_its_failures(server: ForkServer) -> None:
    contenders = [
        Contender("by_hand", SLEEP, {"seconds": 0.1}),
        Contender("broken", SLEEP, {"seconds": 0.01, "loops": 3}),
    ]
    section = Section(
        name="sleepers", title="sleepers", contenders=contenders, seconds=0, unit="ms"
    )

    measurement = race(server, section)

    rounds = measurement.values["by_hand"]
    assert [len(readings) for readings in rounds] == [3, 3]
    assert all(reading >= 20 for readings in rounds for reading in readings)
    assert set(measurement.values) == {"by_hand"}
    assert "out of loops" in measurement.failed["broken"]


def test_rounds_go_on_until_a_difference_is_resolved(server: ForkServer) -> None:
    contenders = [Contender("by_hand", SLEEP, {"seconds": 0.01})]
    section = Section(
        name="sleepers", title="sleepers", contenders=contenders, seconds=0, rounds=1, most_rounds=2
    )

    measurement = race(server, section)

    assert len(measurement.values["by_hand"]) == 2


def test_threads_of_waiting_contenders_stand_still(server: ForkServer) -> None:
    contenders = [
        Contender("by_hand", SLEEP, {"seconds": 0.4}),
        Contender("ticking", TICK),
    ]
    section = Section(
        name="sleepers", title="sleepers", contenders=contenders, seconds=0, rounds=1, unit="s"
    )

    measurement = race(server, section)

    # The first figure is of the time before the race. A thread that ran while the other contender
    # had its turn would tick up to 400 times.
    assert max(measurement.values["ticking"][0][1:]) < 100
