"""Datasets and iterators, made when they are needed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.builders import replicas, run_program
from trainer_kit.errors import DataError
from trainer_kit.inputs.dataset_iterator import ValidationData


class _CountingFactory:
    """Makes datasets that begin at 100 times the number of datasets that were made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> tf.data.Dataset:
        self.count += 1
        return tf.data.Dataset.range(100 * self.count, 100 * self.count + 3)


class _Inputs:
    """Inputs whose dataset is what a function makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def distribute(self, pipeline: Any) -> Any:
        return self._make()


def _create_data(section: str, make: Callable[[], Any], ready_made: Any = None) -> ValidationData:
    return ValidationData(section, _Inputs(make), None, ready_made)


def _take_next(feed: ValidationData, **arguments: Any) -> int:
    return int(next(feed.iterator(**arguments)).numpy())


def test_nothing_is_made_before_it_is_needed_and_then_once() -> None:
    factory = _CountingFactory()
    feed = _create_data("train_data", factory)

    assert factory.count == 0
    assert feed.dataset is feed.dataset
    assert feed.iterator() is feed.iterator()
    assert factory.count == 1


def test_an_iterator_continues_and_a_fresh_one_starts_over() -> None:
    factory = _CountingFactory()
    feed = _create_data("train_data", factory)

    assert _take_next(feed) == 100
    assert _take_next(feed) == 101
    assert _take_next(feed, fresh=True) == 100
    assert _take_next(feed) == 101
    assert factory.count == 1


@pytest.mark.parametrize("how", ["end of a pass", "fresh", "forget", "replace", "no feed any more"])
def test_an_iterator_is_deleted_in_a_thread_of_its_own(how: str) -> None:
    deleted_in: list[int] = []
    gone = threading.Event()

    class Iterator:
        def __next__(self) -> int:
            return 0

        def __del__(self) -> None:
            deleted_in.append(threading.get_ident())
            gone.set()

    class Dataset:
        def __iter__(self) -> Iterator:
            return Iterator()

    feed = _create_data("validation_data", Dataset)
    feed.iterator(fresh=how == "end of a pass")

    if how == "end of a pass":
        feed.end_pass()
    elif how == "fresh":
        feed.iterator(fresh=True)
    elif how == "forget":
        feed.reset()
    elif how == "replace":
        feed.replace(None)
    else:
        del feed

    assert gone.wait(10)
    assert deleted_in[0] != threading.get_ident()


def test_the_end_of_a_pass_keeps_an_iterator_that_goes_on() -> None:
    feed = _create_data("validation_data", _CountingFactory())

    assert _take_next(feed) == 100

    feed.end_pass()

    assert _take_next(feed) == 101


def test_at_the_end_of_the_process_iterators_are_not_deleted() -> None:
    """The process has no TensorFlow, which takes seconds to import, but a Python iterator."""
    code = """
import sys
from unittest import mock

for name in ("tensorflow", "trainer_kit.runtime.tensorflow_internals"):
    sys.modules[name] = mock.MagicMock()
from trainer_kit.inputs.dataset_iterator import ValidationData

class Iterator:
    def __next__(self): return 0
    def __del__(self): print("deleted")

class Dataset:
    def __iter__(self): return Iterator()

feed = ValidationData("validation_data", None, None, Dataset())
feed.iterator()
print("end")
"""
    ended = run_program(code)

    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_forget_makes_the_dataset_anew() -> None:
    feed = _create_data("train_data", _CountingFactory())

    assert _take_next(feed) == 100

    feed.reset()

    assert [_take_next(feed), _take_next(feed)] == [200, 201]


def test_replace_takes_effect_with_the_next_iterator_and_stays() -> None:
    feed = _create_data("train_data", _CountingFactory())
    old = feed.iterator()

    next(old)
    feed.replace(tf.data.Dataset.range(5, 8))

    assert int(next(old)) == 101  # a loop that runs is left alone
    assert _take_next(feed) == 5

    feed.reset()

    assert _take_next(feed) == 5


def _distribute_range(examples: int) -> Any:
    return replicas(2).distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(examples)
    )


@pytest.mark.parametrize("make", [lambda: tf.data.Dataset.range(0), lambda: _distribute_range(0)])
def test_a_dataset_that_is_known_to_be_empty_is_a_data_error(make: Callable[[], Any]) -> None:
    with pytest.raises(DataError):
        _create_data("train_data", make).check_not_empty()


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.data.Dataset.range(1),
        lambda: tf.data.Dataset.range(1).repeat(),
        # Only reading it would tell.
        lambda: tf.data.Dataset.range(1).filter(lambda value: value > 5),
        list,  # not a tf.data.Dataset: it cannot be asked
        lambda: _distribute_range(1),
    ],
)
def test_what_is_not_known_to_be_empty_passes(make: Callable[[], Any]) -> None:
    _create_data("train_data", make).check_not_empty()


@pytest.mark.parametrize(
    ("make", "endless"),
    [
        (lambda all, some: some.batch(2).map(lambda value: value).shuffle(2).prefetch(1), True),
        (lambda all, some: all.flat_map(tf.data.Dataset.range), True),
        (lambda all, some: all.interleave(tf.data.Dataset.range, num_parallel_calls=2), True),
        (lambda all, some: tf.data.Dataset.zip(some.enumerate(), all), True),
        (lambda all, some: tf.data.Dataset.zip(some, some.take(3)), False),
        (lambda all, some: some.take(3).batch(2), False),
        (lambda all, some: some.take_while(lambda value: value < 2), False),
        (lambda all, some: some.window(2).flat_map(lambda values: values.take(1)), False),
        (
            lambda all, some: tf.data.Dataset.sample_from_datasets(
                [some, some], stop_on_empty_dataset=True
            ),
            False,
        ),
        (lambda all, some: some.apply(tf.data.experimental.assert_cardinality(5)), False),
        (lambda all, some: tf.data.Dataset.range(3).filter(lambda value: value > 0), False),
    ],
)
def test_unknown_length_with_only_endless_inputs_is_endless(make: Any, endless: bool) -> None:
    numbers = tf.data.Dataset.range(3).repeat()
    feed = _create_data(
        "validation_data", lambda: make(numbers, numbers.filter(lambda value: value > 0))
    )

    with pytest.raises(DataError) if endless else contextlib.nullcontext():
        feed.check_has_end("trainer.validation_steps")


def test_a_pattern_without_a_file_is_a_data_error() -> None:
    feed = _create_data("train_data", lambda: tf.data.Dataset.list_files("/no/*.records"))
    told = r"^task\.train_data cannot be opened: No files matched pattern: /no/\*\.records\n  "

    with pytest.raises(DataError, match=told + r".*test_dataset_iterator.py:\d+, in "):
        _ = feed.dataset

    wrong = _create_data(
        "train_data", lambda: tf.data.Dataset.range(3, name=str(tf.reshape(tf.zeros([3]), [2])))
    )

    with pytest.raises(tf.errors.InvalidArgumentError):
        _ = wrong.dataset


def test_cardinality_is_known_only_of_a_dataset_that_was_made() -> None:
    feed = _create_data("validation_data", lambda: tf.data.Dataset.range(3))

    assert feed.cardinality() is None

    feed.iterator()

    assert feed.cardinality() == 3


def test_cardinality_of_endless_and_ready_made_data_is_not_known() -> None:
    endless = _create_data("validation_data", lambda: tf.data.Dataset.range(3).repeat())
    ready_made = _create_data("validation_data", lambda: None, tf.data.Dataset.range(3))

    endless.iterator()
    ready_made.iterator()

    assert endless.cardinality() is None
    assert ready_made.cardinality() is None
