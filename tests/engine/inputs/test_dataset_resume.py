"""How plain datasets resume: each kind of pipeline is saved, restored and skipped, and read on.

Every entry of the tables is a claim about TensorFlow: a pipeline that is said to resume in some way does so bit by bit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.inputs.reading_in_order import read_whole_and_skipped
from tests.fork_server import ForkServer
from trainer_kit.inputs.dataset_resume import examine, resume_method, skipped
from trainer_kit.inputs.sources.base import made_inputs

D = tf.data.Dataset
SEVERAL = "an iterator over several replicas cannot be saved"
KEPT: list[Any] = []  # variables and tables, which datasets do not keep alive


@pytest.fixture(autouse=True)
def _global_seed() -> Iterator[None]:
    tf.random.set_seed(3)
    yield
    tf.random.set_seed(None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    for number in range(3):
        with tf.io.TFRecordWriter(str(folder / str(number))) as writer:
            for value in range(20):
                writer.write(str(100 * number + value).encode())
    return sorted(str(path) for path in folder.iterdir())


def _number(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_number(text, tf.int64)


def _stateless(value: tf.Tensor) -> tf.Tensor:
    return value + tf.random.stateless_uniform([], [value, 1], 0, 1000, tf.int64)


def _random(value: tf.Tensor) -> tf.Tensor:
    return value * 0 + tf.random.uniform([], 0, 10**6, tf.int64)


def _table() -> tf.data.Dataset:
    keys = tf.range(50, dtype=tf.int64)
    KEPT.append(tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 7), -1))
    return D.range(50).shuffle(50).map(KEPT[-1].lookup).repeat()


def _variable(change: bool) -> tf.data.Dataset:
    variable = tf.Variable(3, dtype=tf.int64)
    KEPT.append(variable)
    return D.range(50).map(lambda value: variable.assign_add(value) if change else variable * value).repeat()


def _lengths(value: tf.Tensor) -> tf.Tensor:
    return tf.fill([value % 7 + 1], value)


Make = Callable[[list[str]], tf.data.Dataset]
BY_ITERATOR: dict[str, Make] = {
    "shuffle, repeat, batch": lambda _: D.range(25).shuffle(20, seed=1).repeat().batch(4).prefetch(2),
    "repeat, shuffle without a seed": lambda _: D.range(25).repeat().shuffle(20).batch(4, num_parallel_calls=2),
    "one order for all passes": (
        lambda _: D.range(25).shuffle(25, seed=1, reshuffle_each_iteration=False).batch(4).repeat()
    ),
    "shuffle, map, repeat": lambda _: D.range(25).shuffle(9, seed=1).map(_stateless).repeat(2).repeat(),
    "records": lambda files: (
        D.from_tensor_slices(files).repeat().shuffle(3, seed=2).interleave(tf.data.TFRecordDataset, cycle_length=2)
        .map(_number).shuffle(10, seed=1).batch(4)
    ),
    "parallel records": lambda files: (
        D.from_tensor_slices(files).interleave(tf.data.TFRecordDataset, num_parallel_calls=2).map(_number).repeat()
    ),
    "records by num_parallel_reads": lambda files: tf.data.TFRecordDataset(files, num_parallel_reads=2).map(_number),
    "lines": lambda _: tf.data.TextLineDataset([__file__]).map(tf.strings.length).shuffle(9, seed=1).repeat(),
    "parallel map": lambda _: D.range(25).shuffle(20, seed=1).repeat().map(_stateless, num_parallel_calls=2),
    "numpy_function without state": lambda _: D.range(25).repeat().shuffle(9).map(
        lambda value: tf.numpy_function(lambda number: number * 2, [value], tf.int64, stateful=False)
    ),
    "a table": lambda _: _table(),
    "an assertion": lambda _: D.range(25).shuffle(9, seed=1).repeat().map(
        lambda value: (tf.debugging.assert_less(value, tf.constant(50, tf.int64)), value)[1]
    ),
    "enumerate": lambda _: D.range(25).shuffle(9, seed=1).repeat().enumerate().map(lambda index, value: index + value),
    "zip": lambda _: D.zip(D.range(20).shuffle(9, seed=1).repeat(), D.range(30).repeat()),
    "sample_from_datasets": lambda _: D.sample_from_datasets(
        [D.range(15).shuffle(9).repeat(), D.range(100, 120).shuffle(9).repeat()], [0.5, 0.5]
    ),
    "choose_from_datasets": lambda _: D.choose_from_datasets(
        [D.range(15).shuffle(9, seed=1).repeat(), D.range(100, 120).repeat()], D.range(2).repeat()
    ),
    "random": lambda _: D.random().map(lambda value: value % 1000),
    "group_by_window": lambda _: D.range(25).repeat().group_by_window(
        lambda value: value % 3, lambda key, window: window.batch(4), window_size=4
    ),
    "bucket_by_sequence_length": lambda _: (
        D.range(25).map(_lengths).shuffle(20, seed=1).repeat()
        .bucket_by_sequence_length(lambda row: tf.shape(row)[0], [3, 5], [2, 2, 2])
    ),
    "padded and ragged batches": lambda _: (
        D.range(25).map(_lengths).shuffle(9, seed=1).repeat().padded_batch(3).unbatch().ragged_batch(2)
        .map(lambda row: tf.reduce_sum(row))
    ),
    "window, scan, filter": lambda _: (
        D.range(25).repeat().shuffle(9, seed=1).filter(lambda value: value % 3 != 0)
        .window(4).flat_map(lambda window: window.batch(4)).rebatch(3)
        .scan(tf.constant(0, tf.int64), lambda total, rows: (total + rows[0], total + rows))
    ),
    "take, skip, shard, unique": lambda _: (
        D.range(45).skip(5).take(30).shard(2, 1).map(lambda value: value // 2).unique()
        .take_while(lambda value: value != 16).shuffle(9, seed=1).repeat()
    ),
    "ignore_errors": (
        lambda _: D.range(25).shuffle(9, seed=1).repeat().map(lambda value: 100 // (value % 5)).ignore_errors()
    ),
}  # fmt: skip
# With what the reason has to name.
BY_SKIPPING: dict[str, tuple[Make, str]] = {
    "cache": (lambda _: D.range(50).map(_stateless).cache().shuffle(20, seed=1).repeat().batch(4), r"cache\(\)"),
    "a batch between shuffle and repeat": (
        lambda _: D.range(25).shuffle(9, seed=1).batch(4).repeat(),
        r"shuffle\(\), batch\(\), repeat\(\) keeps the iterator",
    ),
    "an interleave between shuffle and repeat": (
        lambda files: D.list_files(files).interleave(tf.data.TFRecordDataset).map(_number).repeat(),
        r"shuffle\(\), .*, repeat\(\) keeps the iterator",
    ),
    "a parallel map between shuffle and repeat": (
        lambda _: D.range(25).shuffle(9, seed=1).map(_stateless, num_parallel_calls=2).repeat(),
        r"shuffle\(\), map\(\), repeat\(\) keeps the iterator",
    ),
    "sample_from_datasets in another order each time": (
        lambda _: D.sample_from_datasets(
            [D.range(9), D.range(100, 120)], [0.5, 0.5], seed=1, rerandomize_each_iteration=True
        ).repeat(),
        r"random\(\), .*, repeat\(\) keeps the iterator",
    ),
    "concatenate": (
        lambda _: D.range(20).concatenate(D.range(100, 150).shuffle(9, seed=1)).repeat(),
        r"concatenate\(\)",
    ),
    "shuffle inside interleave": (
        lambda _: D.range(5).interleave(lambda _: D.range(10).shuffle(10, seed=3), cycle_length=2).repeat(),
        r"interleave\(\): shuffle\(\)",
    ),
    "a variable that stays": (lambda _: _variable(change=False), r"map\(\): ReadVariableOp"),
    "snapshot": (lambda files: D.range(50).snapshot(f"{files[0]}.snapshot").shuffle(9, seed=1).repeat(), "snapshot"),
    "fixed-length records": (
        lambda files: tf.data.FixedLengthRecordDataset(files[:1], 2).map(tf.strings.length),
        r"FixedLengthRecordDataset\(\)",
    ),
}


def _counting() -> Callable[..., Any]:
    count = [0]

    def step(*_: Any) -> np.int64:
        count[0] += 1
        return np.int64(count[0])

    return step


INEXACT: dict[str, tuple[Make, str]] = {
    "map with random numbers": (lambda _: D.range(50).map(_random), r"map\(\): RandomUniformInt draws random numbers"),
    "random numbers in an interleave": (
        lambda _: D.range(5).interleave(lambda _: D.range(9).map(_random)),
        r"interleave\(\): RandomUniformInt draws",
    ),
    "random_shuffle": (lambda _: D.range(50).batch(5).map(tf.random.shuffle), r"map\(\): RandomShuffle draws"),
    "rejection_resample": (
        lambda _: D.range(50).map(lambda value: tf.cast(value % 2, tf.int32))
        .rejection_resample(lambda value: value, [0.2, 0.8], seed=1),
        "RandomUniform draws",
    ),
    "random numbers behind a cache": (lambda _: D.range(50).map(_random).cache(), r"map\(\): RandomUniformInt draws"),
    "a generator of random numbers": (
        lambda _: _generator(),
        r"map\(\): RngReadAndSkip keeps a state",
    ),
    "py_function": (
        lambda _: D.range(50).map(lambda value: tf.py_function(_counting(), [value], tf.int64)),
        r"map\(\): EagerPyFunc runs Python",
    ),
    "numpy_function": (
        lambda _: D.range(50).map(lambda value: tf.numpy_function(_counting(), [value], tf.int64)),
        r"map\(\): PyFunc runs Python",
    ),
    "from_generator": (
        lambda _: D.from_generator(lambda: iter([1, 2]), output_signature=tf.TensorSpec([], tf.int64)),
        r"from_generator\(\).* runs Python",
    ),
    "a variable that changes": (lambda _: _variable(change=True), r"map\(\): AssignAddVariableOp keeps a state"),
    "a map in any order": (
        lambda _: D.range(50).map(_stateless, num_parallel_calls=2, deterministic=False),
        r"map\(\): deterministic=False may change the order",
    ),
    "an interleave in any order": (
        lambda files: D.from_tensor_slices(files).interleave(
            tf.data.TFRecordDataset, num_parallel_calls=2, deterministic=False
        ),
        r"interleave\(\): deterministic=False may change the order",
    ),
}  # fmt: skip


def _generator() -> tf.data.Dataset:
    generator = tf.random.Generator.from_seed(1)
    KEPT.append(generator)
    return D.range(50).map(lambda value: value * 0 + generator.uniform([], 0, 9, tf.int64))


def _read(iterator: Any, count: int) -> list[Any]:
    return [tf.nest.map_structure(lambda value: value.numpy().tolist(), next(iterator)) for _ in range(count)]


def _method(dataset: tf.data.Dataset, saved: bool = True, deterministic: bool = False) -> tuple[str, str]:
    found = resume_method(examine(dataset), no_iterator="" if saved else SEVERAL, deterministic_ops=deterministic)
    return found.method, "\n".join(found.reasons)


def _make(make: Make, files: list[str]) -> tf.data.Dataset:
    """The dataset as a run makes it: after some number of other random ops, which differs from process to process."""
    tf.random.uniform([])
    return made_inputs(lambda params: make(files), None)


def _found(name: str) -> Make:
    return BY_ITERATOR.get(name) or BY_SKIPPING[name][0]


@dataclass(frozen=True)
class _Begun:
    """What one dataset gave.

    Attributes:
      dataset: The dataset.
      elements: What its only iterator read.
      saved: The checkpoints of the iterator, by the number of elements that it had read.
    """

    dataset: tf.data.Dataset
    elements: list[Any]
    saved: dict[int, str]


Begin = Callable[[str], _Begun]
FIRST_PASS, LATER_PASS = 3, 37  # for most
SHORT = "fixed-length records"  # ends in the first pass


@pytest.fixture(scope="module")
def begun(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Returns what the pipeline of a name begins with, for all tests that go on with it."""
    folder = tmp_path_factory.mktemp("iterators")

    @functools.cache
    def begin(name: str) -> _Begun:
        dataset = _make(_found(name), files)
        iterator, elements, saved = iter(dataset), [], {}
        if name in BY_ITERATOR:
            for cut in (FIRST_PASS, LATER_PASS):
                elements += _read(iterator, cut - len(elements))
                saved[cut] = tf.train.Checkpoint(iterator=iterator).write(str(folder / name / str(cut)))
        elements += _read(iterator, FIRST_PASS + 5 if name == SHORT else LATER_PASS + 15 - len(elements))
        return _Begun(dataset, elements, saved)

    return begin


@pytest.mark.parametrize("name", BY_ITERATOR)
def test_a_saved_iterator_goes_on_exactly(name: str, files: list[str], begun: Begin) -> None:
    """In the first pass, and in a later one: two datasets, since iterators of one draw its orders in turn."""
    first = begun(name)
    assert _method(first.dataset) == ("iterator", "")
    for cut, path in first.saved.items():
        resumed = iter(_make(BY_ITERATOR[name], files))
        tf.train.Checkpoint(iterator=resumed).read(path).assert_consumed()
        assert _read(resumed, 15) == first.elements[cut : cut + 15]


@pytest.mark.parametrize("name", [*BY_ITERATOR, *BY_SKIPPING])
def test_skipping_goes_on_exactly(name: str, files: list[str], begun: Begin) -> None:
    """What is skipped was never saved on the way: a save changes nothing that is read after it."""
    cut = FIRST_PASS if name == SHORT else LATER_PASS
    assert _read(iter(skipped(_make(_found(name), files), cut)), 5) == begun(name).elements[cut : cut + 5]


@pytest.mark.parametrize("name", [*BY_ITERATOR, *BY_SKIPPING])
def test_reported_datasets_change_their_order_when_read_again(name: str, files: list[str]) -> None:
    dataset = _make(_found(name), files)
    count = 6 if name == SHORT else 30
    again = _read(iter(dataset), count) == _read(iter(dataset), count)
    assert again == (not examine(dataset).new_orders)


def test_a_shuffle_inside_a_dataset_that_tensorflow_made_is_seen() -> None:
    shuffled = D.range(9).shuffle(9, seed=1)
    dataset = tf.data.experimental.from_variant(tf.data.experimental.to_variant(shuffled), shuffled.element_spec)
    assert examine(dataset).new_orders == ("a dataset inside another: shuffle()",)
    assert _read(iter(dataset), 9) != _read(iter(dataset), 9)


@pytest.mark.parametrize("again", [False, True])
def test_new_orders_are_known_for_shuffles_of_large_arrays(again: bool) -> None:
    dataset = D.from_tensor_slices(np.zeros([2, 2**24], np.int8)).shuffle(2, seed=1, reshuffle_each_iteration=again)
    assert examine(dataset).new_orders == (("shuffle()",) if again else ())


def test_a_dataset_of_version_1_is_not_known_to_repeat() -> None:
    dataset = tf.compat.v1.data.Dataset.range(9)
    if type(dataset).__name__ == "DatasetV1Adapter":
        assert _method(dataset)[0] == "inexact"


@pytest.mark.parametrize("again", [None, False, True])
def test_numbers_that_are_drawn_anew_by_each_iterator_are_seen(again: bool | None) -> None:
    dataset = D.random(seed=1, rerandomize_each_iteration=again)
    assert examine(dataset).new_orders == (("Dataset.random()",) if again else ())
    assert (_read(iter(dataset), 9) != _read(iter(dataset), 9)) == bool(again)


@pytest.mark.parametrize("name", BY_SKIPPING)
def test_what_is_only_skipped_says_why_and_what_it_costs(name: str, begun: Begin) -> None:
    named = BY_SKIPPING[name][1]
    method, reasons = _method(begun(name).dataset)
    assert method == "skip"
    assert reasons.startswith("task.train_data: ")
    assert re.search(named, reasons), reasons
    assert "reads the data from its start" in reasons and "TFRecordSource" in reasons


def test_several_replicas_can_only_skip() -> None:
    dataset = D.range(50).shuffle(9, seed=1)
    method, reasons = _method(dataset, saved=False)
    assert method == "skip" and SEVERAL in reasons
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = strategy.distribute_datasets_from_function(lambda context: dataset)
    with pytest.raises(ValueError, match="trackable"):
        tf.train.Checkpoint(iterator=iter(distributed))


@pytest.fixture(scope="module")
def inexact(files: list[str]) -> Callable[[str], tf.data.Dataset]:
    """Returns the dataset of a name of INEXACT."""
    return functools.cache(lambda name: _make(INEXACT[name][0], files))


@pytest.mark.parametrize("name", INEXACT)
def test_what_cannot_be_resumed_exactly_is_named(name: str, inexact: Callable[[str], tf.data.Dataset]) -> None:
    named = INEXACT[name][1]
    method, reasons = _method(inexact(name))
    assert method == "inexact"
    assert re.search(named, reasons), reasons
    assert "may not be the same as one that was never stopped" in reasons and "ArraySource" in reasons


@pytest.mark.parametrize("name", ["shuffle inside interleave", "a variable that stays", "map with random numbers",
                                  "py_function", "from_generator", "rejection_resample"])  # fmt: skip
def test_an_iterator_that_is_said_not_to_be_savable_is_not(
    name: str, begun: Begin, inexact: Callable[[str], tf.data.Dataset], tmp_path: Path
) -> None:
    iterator = iter(begun(name).dataset if name in BY_SKIPPING else inexact(name))
    with pytest.raises(tf.errors.FailedPreconditionError, match="is stateful"):
        tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "iterator"))


def test_a_small_last_batch_makes_a_saved_iterator_inexact(tmp_path: Path) -> None:
    """The reason for the rule about what is between shuffle and repeat; once this fails, TensorFlow has mended it."""
    make, cut = BY_SKIPPING["a batch between shuffle and repeat"][0], 14  # two passes of 7 batches
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # nothing is read in the background
    options.autotune.enabled = False
    first = iter(_make(make, []).with_options(options))
    _read(first, cut)
    path = tf.train.Checkpoint(iterator=first).write(str(tmp_path / "iterator"))
    resumed = iter(_make(make, []).with_options(options))
    tf.train.Checkpoint(iterator=resumed).read(path).assert_consumed()
    assert _read(resumed, 10) != _read(first, 10)


def test_op_determinism_makes_all_but_python_skippable(inexact: Callable[[str], tf.data.Dataset]) -> None:
    for name in ("map with random numbers", "rejection_resample", "random numbers behind a cache", "random_shuffle",
                 "a map in any order", "an interleave in any order"):  # fmt: skip
        method, _ = _method(inexact(name), deterministic=True)
        assert (name, method) in ((name, "skip"), (name, "iterator"))
        assert (method == "iterator") == name.endswith("any order")
    for name in ("py_function", "from_generator", "a variable that changes", "a generator of random numbers"):
        assert _method(inexact(name), deterministic=True)[0] == "inexact"


def test_any_order_options_and_unseeded_data_are_named() -> None:
    options = tf.data.Options()
    options.deterministic = False
    method, reasons = _method(D.range(9).with_options(options).batch(2))
    assert method == "inexact" and "options(): deterministic=False" in reasons
    tf.random.set_seed(None)
    for dataset, named in ((D.range(9).shuffle(9), "shuffle()"), (D.random(), "Dataset.random()")):
        method, reasons = _method(dataset.batch(2))
        assert method == "inexact" and f"{named} has no seed" in reasons
    assert _method(D.range(9).shuffle(9, seed=1))[0] == "iterator"


def test_a_transformation_that_was_never_tried_is_not_trusted() -> None:
    class OddDataset(type(D.range(1).take(1)).__base__):  # type: ignore[misc]
        def __init__(self, dataset: Any) -> None:
            super().__init__(dataset, dataset._variant_tensor)

    method, reasons = _method(OddDataset(D.range(9)).batch(2))
    assert method == "inexact" and "odd() is not known to give the same elements again" in reasons


def test_op_determinism_repeats_parallel_random_numbers() -> None:
    with ForkServer(["tests.engine.inputs.reading_in_order"]) as server:
        ended = server.run(read_whole_and_skipped)
    assert ended.code == 0, ended.text[-2000:]
