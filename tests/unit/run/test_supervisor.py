"""What a supervisor makes of each exit code."""

from __future__ import annotations

import pytest

from trainer_kit.errors import ExitCode
from trainer_kit.run.supervisor import Decision, classify_exit_code


def test_exit_codes_that_a_restart_can_help() -> None:
    decisions = {code: classify_exit_code(code)[1] for code in (*ExitCode, -9, 42)}

    assert [code for code in decisions if decisions[code] is Decision.RESTART] == [75]
    assert [code for code in decisions if decisions[code] is Decision.RETRY] == [1, 7, -9, 42]


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
def test_the_cause_of_an_end_is_told(code: int, cause: str) -> None:
    assert classify_exit_code(code)[0] == cause
