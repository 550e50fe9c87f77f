"""The order of examples, for every Source; test_arrays.py tests more of it, through ArraySource."""

from __future__ import annotations

import itertools

import pytest

from tests.builders import read_batches, training_data
from trainer_kit.inputs.sources.example_order import Order

# Written down before the order had a module of its own: 11 examples, batches of 4, seed 7; from
# batch 0 and 1,000,000.
GOLDEN_START = [
    [4, 3, 2, 7],
    [1, 8, 5, 10],
    [9, 0, 6, 3],
    [7, 0, 2, 5],
    [9, 6, 4, 10],
    [1, 8, 7, 5],
]
GOLDEN_FAR = [[7, 5, 9, 8], [6, 0, 2, 10]]


def _create_order(examples: int = 11, batch: int = 4, block: int = 1) -> Order:
    return Order(examples, training_data(batch), block=block)


def test_the_order_is_that_of_all_runs_so_far() -> None:
    """A change here changes what every resumed run reads next."""
    assert read_batches(_create_order().at(0), 6) == GOLDEN_START
    assert read_batches(_create_order().at(10**6), 2) == GOLDEN_FAR


@pytest.mark.parametrize("block", [3, 50])
def test_blocks_stay_together_and_are_shuffled(block: int) -> None:
    stream = list(itertools.chain(*read_batches(_create_order(block=block, batch=1).at(0), 33)))
    orders = [stream[k : k + 11] for k in (0, 11, 22)]

    assert all(sorted(order) == list(range(11)) for order in orders)

    for order, start in itertools.product(orders, range(0, 11, block)):
        together = list(range(start, min(start + block, 11)))
        assert order[order.index(start) :][: len(together)] == together

    assert (len({tuple(order) for order in orders}) > 1) == (block < 11)


def test_blocks_can_be_entered_anywhere() -> None:
    order = _create_order(block=3)
    whole = read_batches(order.at(0), 17)

    for position in (1, 3, 12):
        assert read_batches(order.at(position), 5) == whole[position : position + 5]
