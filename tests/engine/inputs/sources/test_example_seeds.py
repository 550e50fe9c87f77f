"""The seed of an example, against known values of a published generator."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from trainer_kit.inputs.sources.example_seeds import epoch_key, example_seeds

ALL = 2**64 - 1


def _apply_splitmix(state: int) -> int:
    """The next output of SplitMix64, as its authors have published it."""
    state = (state + 0x9E3779B97F4A7C15) & ALL
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ALL
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ALL
    return state ^ (state >> 31)


def test_the_hash_is_splitmix64_also_for_large_numbers() -> None:
    # The first output of the published generator for seed 0.
    assert _apply_splitmix(0) == 0xE220A8397B1DCDAF

    for seed, epoch, index in ((0, 0, 0), (7, 3, 22), (-5, 2**40, 2**31), (2**62, 1, 2**50 + 1)):
        key = _apply_splitmix((_apply_splitmix(seed & ALL) + 0x9E3779B97F4A7C15 * epoch) & ALL)
        expected = _apply_splitmix((key + 0x9E3779B97F4A7C15 * index) & ALL)

        seeds = example_seeds(
            epoch_key(seed, tf.constant(epoch, tf.int64)), tf.constant([index], tf.int64)
        ).numpy()

        assert seeds.dtype == np.int32
        assert seeds.shape == (1, 2)
        assert seeds.view(np.uint64).item() == expected
