"""Which steps are traced, and where a loop is cut for them."""

from __future__ import annotations

import pytest

from trainer_kit.errors import UsageError
from trainer_kit.telemetry.profile_window import NO_WINDOW, ProfileSteps, ProfileWindow, parts, profile_steps


@pytest.mark.parametrize(("text", "steps"), [("10:20", (10, 20)), (" 7 : 7 ", (7, 7)), ("1:2", (1, 2))])
def test_a_window_is_its_first_and_its_last_step(text: str, steps: tuple[int, int]) -> None:
    assert profile_steps(text) == ProfileSteps(*steps)
    assert profile_steps(str(profile_steps(text))) == ProfileSteps(*steps)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is not a window of steps; write the first and the last step, as in 10:20"),
        ("10", "is not a window"),
        ("10-20", "is not a window"),
        ("1e3:2e3", "is not a window"),
        ("-1:5", "is not a window"),
        ("1:2:3", "is not a window"),
        ("0:5", "begins at step 0, but the first step of a run is 1"),
        ("20:10", "ends before it begins"),
    ],
)
def test_what_is_no_window_is_told_with_what_one_looks_like(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        profile_steps(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("step", "num_steps", "expected"),
    [
        (0, 30, [9, 11, 10]),
        (0, 9, [9]),
        (9, 11, [11]),
        (12, 5, [5]),
        (15, 10, [5, 5]),
        (20, 5, [5]),
        (8, 3, [1, 2]),
        (0, 0, [0]),
    ],
)
def test_a_loop_is_cut_before_the_first_and_after_the_last_step(step: int, num_steps: int, expected: list[int]) -> None:
    window = ProfileWindow(ProfileSteps(10, 20), lambda: True, lambda: None)
    assert parts(step, num_steps, window.cuts()) == expected


def _trace(
    steps: tuple[int, int], calls: list[tuple[int, int]], starts: bool = True
) -> tuple[list[str], ProfileWindow]:
    """What is done around calls that take the global step from one number to another."""
    done: list[str] = []
    window = ProfileWindow(
        ProfileSteps(*steps), lambda: bool(done.append("start")) or starts, lambda: done.append("stop")
    )
    for step, end in calls:
        window.before(step, end)
        done.append(f"{step}-{end}")
        window.after(end)
    window.close()
    window.close()
    return done, window


@pytest.mark.parametrize(
    ("calls", "done"),
    [
        ([(0, 9), (9, 20), (20, 30)], ["0-9", "start", "9-20", "stop", "20-30"]),
        ([(0, 9), (9, 15), (15, 20)], ["0-9", "start", "9-15", "15-20", "stop"]),
        ([(12, 15)], ["start", "12-15", "stop"]),  # resumed inside, and ended inside
        ([(0, 9)], ["0-9"]),
        ([(20, 30)], ["20-30"]),
        ([(9, 20), (5, 9), (9, 20)], ["start", "9-20", "stop", "5-9", "9-20"]),  # it went back
    ],
)
def test_the_trace_holds_the_window_once_and_is_closed(calls: list[tuple[int, int]], done: list[str]) -> None:
    assert _trace((10, 20), calls)[0] == done


def test_a_failed_trace_start_is_not_retried_and_never_stopped() -> None:
    done, window = _trace((10, 20), [(9, 15), (15, 20)], starts=False)
    assert (done, window.started, window.passed) == (["start", "9-15", "15-20"], False, True)


def test_without_a_window_nothing_is_cut() -> None:
    assert (NO_WINDOW.passed, NO_WINDOW.cuts()) == (True, [])
