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


def _list_attributes(item: _Object) -> dict[str, Any]:
    return {name: value for name, value in vars(item).items() if name != "other"}


def _rebind_attribute(item: Any) -> None:
    item.count += 1000  # as an int of its own


def _add_attribute(item: Any) -> None:
    item.new = "attribute"


def _remove_attribute(item: Any) -> None:
    del item.count


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_rebind_attribute, "count"),
        (_add_attribute, "new"),
        (_remove_attribute, "count"),
        (lambda item: item.items.reverse(), "items"),
        (lambda item: item.sets["a"].add(2), "sets"),
        (lambda item: item.sets["b"][1].update(c=2), "sets"),
        (lambda item: setattr(item, "items", [1, 2]), "items"),
    ],
)
def test_a_change_is_named_and_undone(change: Any, name: str) -> None:
    item = _Object()
    items = item.items
    kept = AttributeSnapshot([item])

    change(item)

    assert kept.restore() == [f"_Object.{name}"]
    assert _list_attributes(item) == _list_attributes(_Object())
    assert item.items is items
    assert kept.restore() == []


def test_unchanged_and_nested_objects_are_not_restored() -> None:
    item = _Object()
    kept = AttributeSnapshot([item])
    item.other.count = 1
    item.count = 0

    assert kept.restore() == []
    assert item.other.count == 1


def test_containers_that_hold_themselves_are_no_trouble() -> None:
    item = _Object()
    item.items.append(item.items)
    kept = AttributeSnapshot([item])

    item.items.append(4)

    assert kept.restore() == ["_Object.items"]
    assert item.items[:2] == [1, 2]
    assert len(item.items) == 3
