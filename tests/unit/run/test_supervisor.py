"""What a supervisor makes of each exit code."""

from __future__ import annotations

import pytest

from trainer_kit.errors import ExitCode
from trainer_kit.run.supervisor import Decision, outcome


def test_exit_codes_that_a_restart_can_help() -> None:
    decisions = {code: outcome(code)[1] for code in ExitCode}
    assert [code for code in ExitCode if decisions[code] is Decision.RESTART] == [75]
    assert [code for code in ExitCode if decisions[code] is Decision.RETRY] == [1, 7]


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (3, "diverged"),
        (4, "model dir in use"),
        (-9, "killed by signal 9 (Killed)"),
        (-11, "killed by signal 11 (Segmentation fault)"),
        (42, "crashed with exit code 42"),
    ],
)
def test_cause_of_an_end(code: int, cause: str) -> None:
    assert outcome(code)[0] == cause


def test_death_by_a_signal_and_a_foreign_code_count_as_crashes() -> None:
    assert outcome(-9)[1] is Decision.RETRY
    assert outcome(42)[1] is Decision.RETRY
