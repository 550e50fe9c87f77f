"""The first batches of data: the same in each pass, from any position, and on several replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import input_context, read_batches, training_data
from trainer_kit.errors import DataError
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.inputs.sources.first_batches import FirstBatches

BATCHES = 3


def _create_source(**params: Any) -> ArraySource:
    return ArraySource(np.arange(11), training_data(2).replace(**params))


def _build_shuffled(**_: Any) -> tf.data.Dataset:
    """Returns an endless dataset with another order in each pass and at each reading."""
    return tf.data.Dataset.range(11).shuffle(11, seed=3).repeat().batch(2, drop_remainder=True)


@pytest.mark.parametrize("make", [_create_source, _build_shuffled])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_each_pass_has_the_same_batches_from_any_position(
    make: Callable[[], Any], position: int
) -> None:
    data = make()
    dataset = data.at(0) if isinstance(data, ArraySource) else make()
    first = read_batches(dataset, BATCHES)
    read = read_batches(FirstBatches(data, BATCHES, True).at(position), 2 * BATCHES)

    assert read == [first[place % BATCHES] for place in range(position, position + 2 * BATCHES)]


def test_a_single_pass_is_the_same_when_it_is_read_again() -> None:
    once = FirstBatches(_build_shuffled(), BATCHES, False).at(0)

    assert len(read_batches(once)) == BATCHES
    assert read_batches(once) == read_batches(once)


def test_replicas_share_the_batches() -> None:
    context = input_context(2)
    cut = FirstBatches(_create_source(global_batch_size=4), BATCHES, True)
    read = [batch for share in read_batches(cut.at(1, context), 4 * BATCHES) for batch in share]
    whole = [batch for share in read_batches(cut.at(1), 2 * BATCHES) for batch in share]

    assert read == whole
    assert whole[: 4 * BATCHES] == whole[4 * BATCHES :]


def test_fewer_batches_than_are_repeated_are_an_error() -> None:
    with pytest.raises(DataError):
        FirstBatches(_create_source(is_training=False), 6, True).at(0)
