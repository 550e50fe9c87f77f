"""Positions in the stream of all batches, against a model that walks through them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from trainer_kit.inputs.batch_position import Position


def _list_used_batches(position: Position, count: int) -> list[int]:
    """The indices of the next batches, found by looking at each."""
    used = (
        batch for batch in itertools.count(position.batch) if batch not in position.skipped_batches
    )
    return list(itertools.islice(used, count))


_POSITIONS = some.builds(
    Position, some.integers(0, 20), some.lists(some.integers(0, 30), max_size=12).map(tuple)
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_POSITIONS, some.integers(0, 40))
def test_nth_after_and_stretches_agree_with_single_batches(position: Position, steps: int) -> None:
    used = _list_used_batches(position, steps + 5)

    assert [position.get_batch_after(k) for k in range(len(used))] == used
    assert _list_used_batches(position.advance(steps), 5) == used[steps:]

    parts = list(position.iterate_ranges())
    assert parts[-1][1] is None
    assert all(length for _, length in parts[:-1])

    batches = [range(begin, begin + (length or 100)) for begin, length in parts]
    assert list(itertools.chain(*batches))[: len(used)] == used


@settings(max_examples=100, deadline=None, derandomize=True)
@given(_POSITIONS, some.integers(0, 15), some.integers(0, 15))
def test_steps_in_two_goes_are_steps_in_one(position: Position, first: int, second: int) -> None:
    assert position.advance(first).advance(second) == position.advance(first + second)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(_POSITIONS, some.integers(0, 15))
def test_only_the_left_out_batch_is_not_used(position: Position, count: int) -> None:
    bad = position.get_batch_after(count)
    expected = [batch for batch in _list_used_batches(position, 30) if batch != bad]

    assert _list_used_batches(position.with_skipped_batch(bad), 29) == expected
    assert position.with_skipped_batch(bad).with_skipped_batch(bad) == position.with_skipped_batch(
        bad
    )
    assert position.with_skipped_batch(bad).batch == position.batch


def test_left_out_batches_are_kept_sorted_and_once() -> None:
    assert Position(0, (5, 2, 5)).skipped_batches == (2, 5)
    assert Position(3, (5, 2)) == Position(3, (2, 5))


@pytest.mark.parametrize("left_out", [(), (2,), (2, 3)])
def test_the_stream_before_a_position_does_not_matter(left_out: tuple[int, ...]) -> None:
    assert list(Position(4, left_out).iterate_ranges()) == [(4, None)]
