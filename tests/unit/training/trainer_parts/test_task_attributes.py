"""When changed values of a task are reported, and what counts as a change of its own state."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.errors import UsageError
from trainer_kit.training.trainer_parts.task_attributes import TaskAttributes, has_own_state


class _Task:
    """Has a count that no checkpoint holds."""

    count = 0


class _Saving(_Task):
    """Has a state of its own, which may be anything."""

    kept: Any = None

    def state(self) -> Any:
        return self.kept

    def restore(self, state: Any) -> None:
        self.kept = state


def test_a_change_before_the_first_step_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    task = _Task()
    values = TaskAttributes(task, trains=True, required=True)
    task.count = 1
    values.report()
    values.first_step_done()
    values.report()
    assert not caplog.records


def test_values_are_compared_before_and_after_loops_1_2_4_and_8() -> None:
    def reported(change: int) -> int:
        """Returns at which look a change right before the look number `change` is reported."""
        task = _Task()
        values, look = TaskAttributes(task, trains=True, required=True), 0
        values.first_step_done()
        while True:
            look += 1
            task.count += look == change
            try:
                values.look()
            except UsageError:
                return look

    assert [reported(change) for change in range(1, 10)] == [1, 2, 3, 4, 7, 7, 7, 8, 15]


def test_an_evaluation_reports_a_change_in_any_loop(caplog: pytest.LogCaptureFixture) -> None:
    task = _Task()
    values = TaskAttributes(task, trains=True, required=False)
    values.first_step_done()
    for _ in range(5):  # into loop 3, whose end has no look
        values.look()
    task.count += 1
    values.look()
    assert not caplog.records
    values.evaluation_begins()
    (record,) = caplog.records
    assert "_Task.count changes while the run trains" in record.getMessage()


def _evaluated(before: Any, after: Any, *, trains: bool = True, required: bool = True) -> None:
    """Evaluates a task whose own state is `before` and then `after`."""
    task = _Saving()
    values = TaskAttributes(task, trains=trains, required=required)
    task.kept = before
    values.evaluation_begins()
    task.kept = after
    values.evaluation_succeeded()


def test_a_state_that_an_evaluation_changes_can_be_an_error() -> None:
    with pytest.raises(UsageError, match=r"require_exact_resume: the evaluation changes what _Saving\.state\(\)"):
        _evaluated({"seen": 1}, {"seen": 2})


def test_a_state_in_another_order_is_the_same_state() -> None:
    _evaluated({"a": 1, "b": [1]}, {"b": [1], "a": 1})


def test_an_evaluation_that_trains_nothing_may_change_the_state() -> None:
    _evaluated({"seen": 1}, {"seen": 2}, trains=False)


def test_a_task_needs_both_methods_to_have_a_state() -> None:
    class Half:
        def state(self) -> None: ...

    assert has_own_state(_Saving()) and not has_own_state(Half()) and not has_own_state(_Task())
