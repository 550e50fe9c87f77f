"""The seed of an example: known values, and no trace of the index or the epoch in it."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from trainer_kit.inputs.sources.example_seeds import epoch_key, example_seeds

ALL = 2**64 - 1


def _seeds(seed: int | None, epoch: int, indices: np.ndarray) -> np.ndarray:
    key = epoch_key(seed, tf.constant(epoch, tf.int64))
    return np.asarray(example_seeds(key, tf.constant(indices, tf.int64)).numpy())


def _splitmix(state: int) -> int:
    """The next output of SplitMix64, as its authors have published it."""
    state = (state + 0x9E3779B97F4A7C15) & ALL
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & ALL
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & ALL
    return state ^ (state >> 31)


def test_the_hash_is_splitmix64_also_for_large_numbers() -> None:
    assert _splitmix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator for seed 0
    for seed, epoch, index in ((0, 0, 0), (7, 3, 22), (-5, 2**40, 2**31), (2**62, 1, 2**50 + 1)):
        key = _splitmix((_splitmix(seed & ALL) + 0x9E3779B97F4A7C15 * epoch) & ALL)
        expected = _splitmix((key + 0x9E3779B97F4A7C15 * index) & ALL)
        found = _seeds(seed, epoch, np.array([index]))
        assert (found.dtype, found.shape, found.view(np.uint64).item()) == (np.int32, (1, 2), expected)


def test_a_seed_depends_on_nothing_but_seed_epoch_and_index() -> None:
    indices = np.array([5, 3, 5, 2**33])
    whole = _seeds(7, 1, np.arange(10))
    assert (_seeds(7, 1, indices)[:3] == whole[[5, 3, 5]]).all()
    assert (_seeds(None, 1, indices) == _seeds(0, 1, indices)).all()
    assert len({_seeds(*one, indices)[0].tobytes() for one in ((7, 1), (7, 2), (8, 1), (1, 7))}) == 4


def _is_random(seeds: np.ndarray) -> bool:
    """Whether the bits of seeds [epochs, n, 2] are even, and related neither to each other nor to their neighbours.

    The neighbours are the next example and the next epoch. Each mean of n signs may be 5 standard deviations from 0.
    """
    bits = np.unpackbits(seeds.view(np.uint8).reshape(*seeds.shape[:2], 8), axis=2)
    signs = 2.0 * bits - 1
    means = [signs, signs[:, 1:] * signs[:, :-1], signs[1:] * signs[:-1]]
    related = np.einsum("enb,enc->bc", signs, signs) / bits[..., 0].size - np.eye(64)
    largest = max(np.abs(related).max(), *(np.abs(mean.mean((0, 1))).max() for mean in means))
    return bool(largest < 5 / np.sqrt(bits[:-1, 1:, 0].size))


def test_seeds_of_adjacent_examples_and_epochs_are_unrelated() -> None:
    epochs, indices = range(8), np.arange(4096)
    seeds = np.stack([_seeds(1, epoch, indices) for epoch in epochs])
    assert _is_random(seeds)
    naive = [np.stack([indices, np.full_like(indices, epoch)], axis=1).astype(np.int32) for epoch in epochs]
    assert not _is_random(np.stack(naive))
    assert not _is_random(np.stack([seeds[0]] * len(epochs)))  # the same in each epoch
    assert not _is_random(seeds & ~1)  # one bit is always 0


def test_all_seeds_of_an_epoch_differ() -> None:
    assert len(np.unique(_seeds(0, 0, np.arange(200_000)).view(np.uint64))) == 200_000
