"""Where the time went: each moment once, for what the main thread was doing."""

from __future__ import annotations

import threading

import pytest

from trainer_kit.telemetry.time_ledger import TimeAccount, TimeLedger


class _Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def ledger(clock: _Clock) -> TimeLedger:
    return TimeLedger(clock)


def _read_seconds(ledger: TimeLedger) -> dict[str, float]:
    return {name: seconds for name, seconds in ledger.build_account().seconds.items() if seconds}


def test_a_run_starts_until_it_is_told_that_it_has_begun(ledger: TimeLedger, clock: _Clock) -> None:
    clock.wait(2)

    assert _read_seconds(ledger) == {"start": 2}

    ledger.end_start()
    ledger.end_start()
    clock.wait(3)
    account = ledger.build_account()

    assert account.seconds["start"] == 2
    assert account.unaccounted_seconds == 3
    assert account.wall == 5


def test_what_is_inside_counts_for_itself_only(ledger: TimeLedger, clock: _Clock) -> None:
    ledger.end_start()

    with ledger.during("report"):
        clock.wait(1)
        with ledger.during("save"):
            clock.wait(2)
        clock.wait(4)

    assert _read_seconds(ledger) == {"report": 5, "save": 2}


def test_names_that_are_reported_as_one_add_up(ledger: TimeLedger, clock: _Clock) -> None:
    ledger.end_start()

    for name in ("evaluate", "evaluation"):  # the evaluation, and the export of its weights
        with ledger.during(name):
            clock.wait(2)

    account = ledger.build_account()

    assert account.seconds["evaluation"] == 4
    assert account.evaluations == 1
    assert account.unaccounted_seconds == 0


def test_an_error_ends_what_it_comes_out_of(ledger: TimeLedger, clock: _Clock) -> None:
    ledger.end_start()

    with pytest.raises(KeyError), ledger.during("report"), ledger.during("callbacks"):
        clock.wait(1)
        raise KeyError

    clock.wait(2)
    account = ledger.build_account()

    assert account.seconds["callbacks"] == 1
    assert account.unaccounted_seconds == 2


def test_a_loop_is_taken_apart_into_start_input_and_step(ledger: TimeLedger, clock: _Clock) -> None:
    for first, waited in ((3.0, 2.0), (-50.0, 1.0)):
        with ledger.during("train"):
            clock.wait(10)
        ledger.add_loop(5, waited, first)

    account = ledger.build_account()

    assert account.seconds["start"] == 3
    assert account.seconds["input"] == 3
    assert account.seconds["step"] == 14
    assert account.steps == 10


def test_no_more_is_taken_out_of_loops_than_they_took(ledger: TimeLedger, clock: _Clock) -> None:
    ledger.end_start()
    with ledger.during("train"):
        clock.wait(10)

    ledger.add_loop(1, 99.0, 4.0)

    assert _read_seconds(ledger) == {"start": 4, "input": 6}


def test_a_wait_that_is_not_known_is_not_told_as_none(ledger: TimeLedger, clock: _Clock) -> None:
    with ledger.during("train"):
        clock.wait(10)

    ledger.add_loop(5, None, 0.0)
    account = ledger.build_account()

    assert "input" not in account.seconds
    assert "input" not in account.to_record()
    assert account.format_shares() == "10.0 s: step with its input 100 %"


def test_evaluations_are_counted_and_the_first_is_kept_apart(
    ledger: TimeLedger, clock: _Clock
) -> None:
    for seconds in (5, 2, 2):
        with ledger.during("evaluate"):
            clock.wait(seconds)
            with ledger.during("callbacks"):
                clock.wait(1)

    account = ledger.build_account()

    assert account.evaluations == 3
    assert account.first_evaluation_seconds == 5
    assert account.seconds["evaluation"] == 9


def test_what_another_thread_does_is_not_counted(ledger: TimeLedger, clock: _Clock) -> None:
    def save() -> None:
        with ledger.during("save"):
            clock.wait(1)

    with ledger.during("evaluate"):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    assert _read_seconds(ledger) == {"evaluation": 1}


def test_the_record_has_every_name_in_seconds_and_adds_up() -> None:
    account = TimeAccount({"start": 1.00049, "input": 0.0, "step": 6.0}, wall=10.0, steps=3)
    record = account.to_record()

    assert record == {
        "seconds": 10.0,
        "start": 1.0,
        "input": 0.0,
        "step": 6.0,
        "unaccounted": 3.0,
        "steps": 3,
    }


def test_the_line_has_the_largest_first_without_tiny_shares() -> None:
    seconds = {"start": 9.6, "input": 5.4, "step": 41.2, "callbacks": 0.1, "save": 3.0}
    line = TimeAccount(seconds, wall=61.23, steps=3).format_shares()

    assert line == "61.2 s: step 67 %, start 16 %, input 9 %, save 5 %, unaccounted 3 %"
    assert TimeAccount({}, wall=0.0).format_shares() == "0.0 s: "
