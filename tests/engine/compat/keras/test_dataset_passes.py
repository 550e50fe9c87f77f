"""The orders of a new process's first pass: those of a process that read all passes before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.compat.keras.dataset_passes import DatasetPasses

Make = Callable[[tf.data.Dataset], tf.data.Dataset]


def reshuffle(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset in another order in each pass."""
    return dataset.shuffle(8, seed=2)


def add_random_numbers(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the sums of numbers and of random numbers, which are others in each pass."""
    random = tf.data.Dataset.random(seed=1, rerandomize_each_iteration=True)
    return tf.data.Dataset.zip((dataset, random)).map(lambda number, other: number + other)


def add_read_count(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns numbers plus the number of elements that were read so far, in all passes."""
    read = tf.Variable(0, dtype=tf.int64)
    return dataset.map(lambda number: 100 * read.assign_add(1) + number)


def add_noise(number: tf.Tensor) -> tf.Tensor:
    """Returns a number plus a random number, which is drawn in a loop of a branch."""

    def draw(start: tf.Tensor) -> tf.Tensor:
        return start + tf.random.uniform([], maxval=99, dtype=tf.int64, seed=3)

    return tf.cond(
        number % 2 == 0, lambda: tf.map_fn(draw, number[tf.newaxis])[0], lambda: draw(number)
    )


# What comes after a shuffle over numbers. Passes before are read as far as needed: not at all, or a
# batch, or all.
CHAINS: dict[str, Make] = {
    "batches": lambda d: d.batch(4),
    "batches in parallel": lambda d: d.batch(4, num_parallel_calls=2).prefetch(2),
    "padded batches": lambda d: d.padded_batch(4, padded_shapes=[]),
    "filter": lambda d: d.filter(lambda number: number < 20).batch(4),
    "skip, take, shard": lambda d: d.skip(3).take(15).shard(2, 0).batch(4),
    "errors ignored": lambda d: d.ignore_errors().with_options(tf.data.Options()).batch(4),
    "unbatch": lambda d: d.batch(3).unbatch().batch(4),
    "a shuffle of batches": lambda d: reshuffle(d.batch(4)),
    "a shuffle in one order": lambda d: d.shuffle(8, seed=7, reshuffle_each_iteration=False).batch(
        4
    ),
    "three shuffles": lambda d: (
        reshuffle(reshuffle(d.batch(4)).unbatch().map(tf.identity)).batch(2).rebatch(3)
    ),
    "zip": lambda d: (
        tf.data.Dataset.zip((d, d.map(tf.negative))).map(lambda a, b: 100 * a + b).batch(4)
    ),
    "repeat": lambda d: d.repeat(2).batch(4),
    "a shuffle in a function": lambda d: d.batch(4).flat_map(
        lambda batch: tf.data.Dataset.from_tensor_slices(batch).shuffle(4, seed=3)
    ),
    "cache": lambda d: reshuffle(d.cache()).batch(4),
    "random ops": lambda d: d.map(add_noise).batch(4),
    "a variable": lambda d: add_read_count(d).batch(4),
    "random numbers": lambda d: add_random_numbers(d).batch(4),
    "shuffled random numbers": lambda d: reshuffle(add_random_numbers(d)).batch(4),
    "concatenate": lambda d: d.concatenate(reshuffle(tf.data.Dataset.range(9))).batch(4),
}


def read_all_batches(dataset: tf.data.Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("name", CHAINS)
def test_a_new_process_draws_the_orders_of_a_later_pass(name: str) -> None:
    tf.random.set_seed(3)
    first, later = (CHAINS[name](tf.data.Dataset.range(24).shuffle(8, seed=1)) for _ in range(2))
    whole = [read_all_batches(first) for _ in range(3)]

    passes = DatasetPasses(later, len(whole[0]), original_dataset=later)
    assert passes.prepare_pass(2 * len(whole[0]) + 1, has_iterator=False)

    assert read_all_batches(passes.at(2 * len(whole[0]) + 1)) == whole[2][1:]
    assert whole[2] != whole[1]


def test_files_are_read_in_the_orders_of_a_later_pass(tmp_path: Path) -> None:
    for file in range(3):
        with tf.io.TFRecordWriter(str(tmp_path / str(file))) as writer:
            for number in range(8):
                writer.write(str(8 * file + number))

    def read_records() -> tf.data.Dataset:
        files = tf.data.Dataset.from_tensor_slices([str(tmp_path / str(file)) for file in range(3)])
        read = reshuffle(files).interleave(
            tf.data.TFRecordDataset, num_parallel_calls=2, deterministic=True
        )
        return reshuffle(read).map(lambda text: tf.strings.to_number(text, tf.int64)).batch(4)

    first = read_records()
    later = read_records()
    whole = [read_all_batches(first) for _ in range(3)]

    passes = DatasetPasses(later, 6, original_dataset=later)
    passes.prepare_pass(12, has_iterator=False)
    assert read_all_batches(passes.at(12)) == whole[2]


def test_passes_before_are_not_read_only_for_their_orders() -> None:
    def fail_at_the_end(number: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(number < 23, ["read to the end"])]):
            return tf.identity(number)

    shuffled_once = reshuffle(tf.data.Dataset.range(24).map(fail_at_the_end))
    for shuffled in (shuffled_once, reshuffle(shuffled_once)):
        dataset = shuffled.batch(2)
        passes = DatasetPasses(dataset, 12, original_dataset=dataset)
        assert passes.prepare_pass(60, has_iterator=False)


def test_passes_of_a_finished_run_count_for_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    first, again = (tf.data.Dataset.range(24).shuffle(24, seed=1).batch(4) for _ in range(2))
    whole = [read_all_batches(first) for _ in range(4)]

    finished = DatasetPasses(again, 6, original_dataset=again)
    finished.begin_passes(2)
    finished.begin_passes(2)  # a second start of the same run in this process draws nothing
    resumed = DatasetPasses(again, 6, original_dataset=again)
    resumed.earlier_passes = 2
    resumed.prepare_pass(6 + 1, has_iterator=False)
    assert read_all_batches(resumed.at(6 + 1)) == whole[3][1:]
    assert not caplog.text


def test_a_run_that_goes_back_says_that_it_draws_other_orders(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = tf.data.Dataset.range(24).shuffle(24, seed=1).batch(4)
    passes = DatasetPasses(dataset, 6, original_dataset=dataset)
    for position in (0, 6, 0, 6):
        passes.prepare_pass(position, has_iterator=False)

    assert caplog.text.count("x: a dataset that was read in this process before") == 1
