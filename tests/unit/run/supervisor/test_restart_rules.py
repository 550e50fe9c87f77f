"""Who is started again, and when: decided without a process and without waiting."""

from __future__ import annotations

import signal

import pytest

from trainer_kit.errors import ExitCode
from trainer_kit.run.supervisor.restart_rules import OUTCOMES, Decision, Policy, backoff, outcome


def _seconds(policy: Policy, *ends: tuple[int, int | None]) -> list[float | None]:
    """Returns the wait after each end, (code, step); None where nothing is started again."""
    verdicts = [policy.after(code, step) for code, step in ends]
    return [verdict.seconds if verdict.restart else None for verdict in verdicts]


def test_every_exit_code_has_its_decision() -> None:
    assert set(OUTCOMES) == set(ExitCode)
    assert {code for code, (_, decision) in OUTCOMES.items() if decision is Decision.RESTART} == {75}
    assert {code for code, (_, decision) in OUTCOMES.items() if decision is Decision.RETRY} == {1, 7}


def test_each_cause_has_a_word_of_its_own() -> None:
    assert len({cause for cause, _ in OUTCOMES.values()}) == len(ExitCode)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-9, "killed by SIGKILL"),
        (-6, "killed by SIGABRT"),
        (-11, "killed by SIGSEGV"),
        (-signal.SIGRTMAX + 1, f"killed by signal {signal.SIGRTMAX - 1}"),
        (42, "crashed with exit code 42"),
    ],
)
def test_death_by_a_signal_and_a_foreign_code_are_crashes(code: int, cause: str) -> None:
    assert outcome(code) == (cause, Decision.RETRY)


def test_the_wait_doubles_up_to_its_bound() -> None:
    assert [backoff(number, 1.0, 10.0) for number in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 8, 10, 10]
    assert backoff(1, 5.0, 2.0) == 2.0
    assert backoff(100_000, 0.5, 60.0) == 60.0


def test_crashes_wait_and_count_until_none_is_left() -> None:
    policy = Policy(3, 1.0, 60.0)
    assert _seconds(policy, (1, 10), (7, 5), (-9, 8)) == [1, 2, 4]
    last = policy.after(1, 40)
    assert not last.restart and "no restart is left of 3" in last.text


def test_with_0_restarts_only_preemptions_are_restarted() -> None:
    assert _seconds(Policy(0, 1.0, 60.0), (75, 10), (75, 20), (1, 30)) == [0, 0, None]


def test_preemptions_that_gain_steps_neither_count_nor_wait() -> None:
    policy = Policy(1, 1.0, 60.0)
    assert _seconds(policy, *((75, step) for step in range(100))) == [0] * 100
    assert _seconds(policy, (1, 100), (75, 120), (1, 130)) == [1, 0, None]


def test_preemptions_that_gain_no_step_wait_longer_each_time() -> None:
    policy = Policy(0, 1.0, 60.0)
    stuck = _seconds(policy, (75, 5), *[(75, 5)] * 10)
    assert stuck == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert _seconds(policy, (75, None), (75, 4), (75, 6), (75, 6)) == [60, 60, 0, 1]


def test_preemptions_before_the_first_step_wait_too() -> None:
    assert _seconds(Policy(0, 1.0, 60.0), (75, None), (75, None), (75, 0), (75, None)) == [1, 2, 0, 1]


def test_a_preemption_that_waits_tells_why() -> None:
    policy = Policy(0, 1.0, 60.0)
    texts = [policy.after(75, step).text for step in (None, 30, 20)]
    assert texts == [
        "restart in 1 s: its step is not known",
        "restart at once",
        "restart in 1 s: no step after 30 was reached",
    ]


def test_the_second_crash_at_a_step_ends_it_and_names_the_step() -> None:
    policy = Policy(100, 1.0, 60.0)
    assert _seconds(policy, (1, 30), (1, 40)) == [1, 1]
    verdict = policy.after(-11, 40)
    assert not verdict.restart and "at step 40" in verdict.text


def test_two_crashes_before_any_step_end_it() -> None:
    policy = Policy(100, 1.0, 60.0)
    assert policy.after(1, None).restart
    verdict = policy.after(1, None)
    assert not verdict.restart and "before its first step" in verdict.text


def test_a_crash_before_any_step_is_not_one_at_step_0() -> None:
    assert _seconds(Policy(100, 1.0, 60.0), (1, None), (1, 0), (1, None)) == [1, 1, 2]


def test_a_wait_is_short_again_after_a_crash_that_came_further() -> None:
    policy = Policy(100, 1.0, 60.0)
    assert _seconds(policy, (1, 30), (1, 20), (1, 25), (1, 31), (1, 30)) == [1, 2, 4, 1, 2]


def test_kills_from_outside_are_not_crashes_at_one_step() -> None:
    policy = Policy(3, 1.0, 60.0)
    assert _seconds(policy, *[(-9, None)] * 4) == [1, 2, 4, None]


def test_a_preemption_does_not_hide_crashes_at_the_same_step() -> None:
    assert _seconds(Policy(100, 1.0, 60.0), (1, 40), (75, 35), (1, 40)) == [1, 1, None]


def test_crashes_without_known_steps_are_not_at_the_same_step() -> None:
    policy = Policy(3, 1.0, 60.0)
    verdicts = [policy.after(1, None, silent=True) for _ in range(4)]
    assert [verdict.seconds for verdict in verdicts if verdict.restart] == [1, 2, 4]
    assert verdicts[-1].text == "end: no restart is left of 3"


def test_without_known_steps_a_long_attempt_counts_as_progress() -> None:
    policy = Policy(9, 1.0, 60.0)
    ends = [(75, 61.0), (75, 59.0), (75, 1.0), (75, 61.0), (1, 1.0), (1, 1.0), (1, 61.0), (1, 1.0)]
    seconds = [policy.after(code, None, seconds=lasted, silent=True).seconds for code, lasted in ends]
    assert seconds == [0, 1, 2, 0, 1, 2, 1, 2]


def test_a_step_that_is_told_counts_although_others_are_not() -> None:
    policy = Policy(9, 1.0, 60.0)
    assert policy.after(1, 40, silent=True).restart
    assert not policy.after(1, 40, seconds=61.0, silent=True).restart
