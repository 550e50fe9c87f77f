"""Which steps are traced."""

from __future__ import annotations

import pytest

from trainer_kit.errors import UsageError
from trainer_kit.telemetry.profile_window import ProfileSteps, parse_profile_steps


@pytest.mark.parametrize(
    ("text", "steps"), [("10:20", (10, 20)), (" 7 : 7 ", (7, 7)), ("1:2", (1, 2))]
)
def test_a_window_is_its_first_and_its_last_step(text: str, steps: tuple[int, int]) -> None:
    assert parse_profile_steps(text) == ProfileSteps(*steps)
    assert parse_profile_steps(str(parse_profile_steps(text))) == ProfileSteps(*steps)


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
        parse_profile_steps(text)

    assert repr(text) in str(error.value)
