"""What plain Python code changes, seen and undone."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.training.loops.eval_loop import AttributeSnapshot


class _Object:
    def __init__(self) -> None:
        self.count = 0
        self.items = [1, 2]
        self.sets = {"a": {1}, "b": ([], {"c": 1})}
        self.other = _Inner()


class _Inner:
    def __init__(self) -> None:
        self.count = 0


def _plain(one: _Object) -> dict[str, Any]:
    return {name: value for name, value in vars(one).items() if name != "other"}


def _rebind(one: Any) -> None:
    one.count += 1000  # as an int of its own


def _add(one: Any) -> None:
    one.new = "attribute"


def _remove(one: Any) -> None:
    del one.count


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_rebind, "count"),
        (_add, "new"),
        (_remove, "count"),
        (lambda one: one.items.reverse(), "items"),
        (lambda one: one.sets["a"].add(2), "sets"),
        (lambda one: one.sets["b"][1].update(c=2), "sets"),
        (lambda one: setattr(one, "items", [1, 2]), "items"),
    ],
)
def test_a_change_is_named_and_undone(change: Any, name: str) -> None:
    one = _Object()
    items = one.items
    kept = AttributeSnapshot([one])
    change(one)
    assert kept.restore() == [f"_Object.{name}"]
    assert _plain(one) == _plain(_Object())
    assert one.items is items
    assert kept.restore() == []


def test_unchanged_and_nested_objects_are_not_restored() -> None:
    one = _Object()
    kept = AttributeSnapshot([one])
    one.other.count = 1
    one.count = 0
    assert kept.restore() == []
    assert one.other.count == 1


def test_containers_that_hold_themselves_are_no_trouble() -> None:
    one = _Object()
    one.items.append(one.items)
    kept = AttributeSnapshot([one])
    one.items.append(4)
    assert kept.restore() == ["_Object.items"]
    assert one.items[:2] == [1, 2]
    assert len(one.items) == 3
