"""Arrays in batches, from any position on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.compat.keras.array_epochs import ArrayEpochs


@pytest.mark.parametrize("keras_2", [False, True])
def test_arrays_go_on_at_a_position(keras_2: bool) -> None:
    tf.random.set_seed(1)
    examples = np.arange(21).reshape(7, 3)
    source = ArrayEpochs(tf.constant(examples), 2, shuffle=True, is_keras_2=keras_2)
    batches = [batch.numpy().tolist() for batch in source.at(0).take(8)]

    assert [len(batch) for batch in batches] == [2, 2, 2, 1] * 2
    assert sorted(itertools.chain.from_iterable(batches[:4])) == examples.tolist()
    assert (batches[:4] == batches[4:]) is not keras_2

    for position in (1, 6):
        again = [batch.numpy().tolist() for batch in source.at(position).take(8 - position)]
        assert again == batches[position:]
