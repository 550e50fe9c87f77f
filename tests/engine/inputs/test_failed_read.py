"""The state of an iterator that contains a failed read, for each transformation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tests.builders import wait_until
from trainer_kit.inputs.failed_read import has_failed_read

D = tf.data.Dataset
# The last batch that can be read, and the transformation.
READ_AHEAD: dict[str, tuple[int, Callable[[tf.data.Dataset], tf.data.Dataset]]] = {
    "prefetch": (4, lambda data: data.prefetch(8)),
    "batch": (2, lambda data: data.batch(2, num_parallel_calls=4)),
    "batch, prefetch": (1, lambda data: data.batch(4).prefetch(2)),
    "shuffle, prefetch": (1, lambda data: data.prefetch(8).shuffle(4, seed=1).prefetch(4)),
    "inside a zip": (4, lambda data: D.zip(D.range(40), data.prefetch(8))),
    "flat_map, prefetch": (
        2,
        lambda data: data.batch(3).flat_map(D.from_tensor_slices).batch(2).prefetch(8),
    ),
    "interleave": (
        4,
        lambda data: D.range(2).interleave(
            lambda _: data, cycle_length=2, block_length=4, num_parallel_calls=2
        ),
    ),
}


@pytest.mark.parametrize("name", READ_AHEAD)
def test_a_failed_read_in_a_buffer_is_known(name: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    prefix = str(tmp_path / "state")

    def read(number: tf.Tensor) -> tf.Tensor:
        content = tf.cond(
            number == 8, lambda: tf.io.read_file(str(missing)), lambda: tf.constant("")
        )
        return number + tf.cast(tf.strings.length(content), tf.int64)

    last, make = READ_AHEAD[name]
    dataset = make(D.range(40).map(read, num_parallel_calls=4))
    iterator = iter(dataset)
    for _ in range(last):
        next(iterator)
    wait_until(
        lambda: has_failed_read(tf.train.Checkpoint(iterator=iterator).write(prefix)), seconds=30
    )

    missing.write_text("")
    restored = iter(dataset)

    tf.train.Checkpoint(iterator=restored).read(prefix)

    assert has_failed_read(prefix)

    with pytest.raises(tf.errors.NotFoundError):
        for _ in range(20):
            next(restored)


def test_a_state_without_one_or_a_damaged_file_holds_none(tmp_path: Path) -> None:
    dataset = D.range(40).map(lambda number: number + 1, num_parallel_calls=4)
    iterator = iter(dataset.batch(2).prefetch(4))
    next(iterator)

    state = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "state"))

    assert not has_failed_read(state)

    (tmp_path / "empty.data-00000-of-00001").touch()

    assert not has_failed_read(str(tmp_path / "empty"))
