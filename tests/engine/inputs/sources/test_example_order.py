"""The order of examples, for every Source; test_arrays.py tests more of it, through ArraySource."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.sources.example_order import Order, replicas_here

# Written down before the order had a module of its own: 11 examples, batches of 4, seed 7; from batch 0 and 1,000,000.
GOLDEN_START = [[4, 3, 2, 7], [1, 8, 5, 10], [9, 0, 6, 3], [7, 0, 2, 5], [9, 6, 4, 10], [1, 8, 7, 5]]
GOLDEN_FAR = [[7, 5, 9, 8], [6, 0, 2, 10]]


def _order(examples: int = 11, batch: int = 4, block: int = 1) -> Order:
    return Order(examples, DataConfig(is_training=True, global_batch_size=batch, seed=7), block=block)


def _read(dataset: tf.data.Dataset, batches: int) -> list[list[int]]:
    return [batch.tolist() for batch in dataset.take(batches).as_numpy_iterator()]


def test_the_order_is_that_of_all_runs_so_far() -> None:
    """A change here changes what every resumed run reads next."""
    assert _read(_order().at(0), 6) == GOLDEN_START
    assert _read(_order().at(10**6), 2) == GOLDEN_FAR


@pytest.mark.parametrize("block", [3, 50])
def test_blocks_stay_together_and_are_shuffled(block: int) -> None:
    stream = list(itertools.chain(*_read(_order(block=block, batch=1).at(0), 33)))
    orders = [stream[k : k + 11] for k in (0, 11, 22)]
    assert all(sorted(order) == list(range(11)) for order in orders)
    for order, start in itertools.product(orders, range(0, 11, block)):
        together = list(range(start, min(start + block, 11)))
        assert order[order.index(start) :][: len(together)] == together
    assert (len({tuple(order) for order in orders}) > 1) == (block < 11)


def test_blocks_can_be_entered_anywhere() -> None:
    order = _order(block=3)
    whole = _read(order.at(0), 17)
    for position in (1, 3, 12):
        assert _read(order.at(position), 5) == whole[position : position + 5]


def test_replicas_of_a_pipeline_are_counted() -> None:
    assert replicas_here(None) == 1
    assert replicas_here(tf.distribute.InputContext(2, 1, 6)) == 3


def test_what_makes_no_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="global_batch_size is 0"):
        _order(batch=0)
    with pytest.raises(DataError, match="global_batch_size is 12, but there are 11 examples"):
        _order(batch=12)


def test_indices_are_int64_of_a_static_batch() -> None:
    spec = _order().at(0).element_spec
    assert (spec.dtype, spec.shape.as_list()) == (tf.int64, [4])
    assert np.asarray(_read(_order().at(0), 3)).shape == (3, 4)
