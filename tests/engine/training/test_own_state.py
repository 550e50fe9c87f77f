"""What counts as a task with a state of its own."""

from __future__ import annotations

from trainer_kit.training.task import has_own_state


class _Half:
    def state(self) -> None: ...


class _Whole(_Half):
    def restore(self, state: None) -> None: ...


def test_a_task_needs_both_methods_to_have_a_state() -> None:
    assert has_own_state(_Whole()) and not has_own_state(_Half()) and not has_own_state(object())
