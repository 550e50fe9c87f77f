"""How plain datasets resume: each kind of pipeline is saved, restored and skipped, and read on.

Every entry of the tables is a claim about TensorFlow: a pipeline that is said to resume in some way
does so bit by bit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import replicas, write_records
from tests.engine.inputs.reading_in_order import read_whole_and_skipped
from tests.fork_server import ForkServer
from trainer_kit.inputs import dataset_resume
from trainer_kit.inputs.dataset_resume import choose_resume_method, examine_dataset, skip_batches
from trainer_kit.inputs.dataset_structure import get_transformation_kind, iterate_transformations
from trainer_kit.inputs.sources.source_protocol import call_build_inputs

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
    """Returns the paths of three files of records, each with a file of lines beside it."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(3):
        values = [str(100 * number + value) for value in range(6)]
        (folder / f"{number}.txt").write_text("\n".join(values))
        write_records(folder / str(number), [value.encode() for value in values])
    return sorted(str(path) for path in folder.iterdir() if not path.suffix)


def _parse_number(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_number(text, tf.int64)


def _add_stateless_random(value: tf.Tensor) -> tf.Tensor:
    return value + tf.random.stateless_uniform([], [value, 1], 0, 1000, tf.int64)


def _add_random(value: tf.Tensor) -> tf.Tensor:
    return value * 0 + tf.random.uniform([], 0, 10**6, tf.int64)


def _build_with_table() -> tf.data.Dataset:
    keys = tf.range(9, dtype=tf.int64)
    KEPT.append(tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 7), -1))
    return D.range(9).shuffle(9).map(KEPT[-1].lookup).repeat(2)


def _build_with_variable(change: bool) -> tf.data.Dataset:
    variable = tf.Variable(3, dtype=tf.int64)
    KEPT.append(variable)
    return (
        D.range(9)
        .map(lambda value: variable.assign_add(value) if change else variable * value)
        .repeat(2)
    )


def _fill_lengths(value: tf.Tensor) -> tf.Tensor:
    return tf.fill([value % 7 + 1], value)


Make = Callable[[list[str]], tf.data.Dataset]
CHAINS: dict[str, Make] = {
    "shuffle, repeat, batch, prefetch": lambda _: (
        D.range(7).shuffle(5, seed=1).repeat(3).batch(2).prefetch(2)
    ),
    "repeat, shuffle without a seed": lambda _: (
        D.range(7).repeat(3).shuffle(5).batch(2, num_parallel_calls=2)
    ),
    "batch, shuffle, repeat": lambda _: D.range(7).batch(2).shuffle(3, seed=1).repeat(4),
    "one order for all passes": (
        lambda _: D.range(7).shuffle(7, seed=1, reshuffle_each_iteration=False).batch(2).repeat(3)
    ),
    "shuffle, map, repeat": lambda _: (
        D.range(7).shuffle(9, seed=1).map(_add_stateless_random).repeat(2).repeat(2)
    ),
    "parallel map": lambda _: (
        D.range(7)
        .shuffle(7, seed=1)
        .repeat(3)
        .map(_add_stateless_random, num_parallel_calls=2)
        .batch(2)
    ),
    "options and cardinality": lambda _: (
        D.range(7)
        .shuffle(7, seed=1)
        .with_options(tf.data.Options())
        .apply(tf.data.experimental.assert_cardinality(7))
        .repeat(3)
    ),
    "take, skip, shard": lambda _: (
        D.range(30).skip(2).take(21).shard(2, 1).shuffle(4, seed=1).repeat(2)
    ),
    "skip and take of a repeat": lambda _: (
        D.range(7).shuffle(7, seed=1).repeat().skip(3).take(17).batch(2)
    ),
    "filter": lambda _: (
        D.range(9).filter(lambda value: value % 3 != 0).shuffle(5, seed=1).repeat(3).batch(2)
    ),
    "filter of a repeat": lambda _: (
        D.range(9).shuffle(5, seed=1).repeat(2).filter(lambda value: value % 3 != 0)
    ),
    "padded batches": lambda _: (
        D.range(7).map(_fill_lengths).shuffle(5, seed=1).repeat(3).padded_batch(2)
    ),
    "unbatch": lambda _: (
        D.range(8).batch(3).unbatch().shuffle(5, seed=1).repeat(2).batch(3).unbatch()
    ),
    "arrays and one tensor": lambda _: (
        D.from_tensors(tf.range(3, dtype=tf.int64))
        .repeat(2)
        .flat_map(D.from_tensor_slices)
        .shuffle(3, seed=1)
    ),
    "records": lambda files: (
        D.from_tensor_slices(files)
        .shuffle(3, seed=2)
        .repeat(2)
        .interleave(tf.data.TFRecordDataset, cycle_length=2)
        .map(_parse_number)
        .shuffle(4, seed=1)
        .batch(2)
    ),
    "parallel records": lambda files: (
        D.from_tensor_slices(files)
        .shuffle(3, seed=2)
        .repeat(2)
        .interleave(
            lambda file: tf.data.TFRecordDataset(file).map(_parse_number),
            cycle_length=2,
            num_parallel_calls=2,
        )
        .shuffle(4, seed=1)
        .batch(2)
        .prefetch(2)
    ),
    "records by num_parallel_reads": lambda files: (
        tf.data.TFRecordDataset(files, num_parallel_reads=2).map(_parse_number).repeat(2).batch(2)
    ),
    "records of files in turn": lambda files: (
        D.list_files([*files], seed=1)
        .repeat(2)
        .flat_map(tf.data.TFRecordDataset)
        .map(_parse_number)
    ),
    "lines": lambda files: (
        tf.data.TextLineDataset([f"{file}.txt" for file in files])
        .map(_parse_number)
        .shuffle(5, seed=1)
        .repeat(2)
    ),
    "numpy_function without state": lambda _: (
        D.range(7)
        .repeat(2)
        .shuffle(9)
        .map(
            lambda value: tf.numpy_function(
                lambda number: number * 2, [value], tf.int64, stateful=False
            )
        )
    ),
    "a table": lambda _: _build_with_table(),
    "an assertion": lambda _: (
        D.range(7)
        .shuffle(9, seed=1)
        .repeat(2)
        .map(lambda value: (tf.debugging.assert_less(value, tf.constant(50, tf.int64)), value)[1])
    ),
}
# With what the reason has to name.
SKIPPED: dict[str, tuple[Make, str]] = {
    "cache": (
        lambda _: (
            D.range(7).map(_add_stateless_random).cache().shuffle(5, seed=1).repeat(3).batch(2)
        ),
        r"cache\(\)",
    ),
    "a batch between shuffle and repeat": (
        lambda _: D.range(7).shuffle(7, seed=1).batch(2).repeat(4),
        r"shuffle\(\) below batch\(\) and repeat\(\)",
    ),
    "an interleave between shuffle and repeat": (
        lambda files: (
            D.list_files(files).interleave(tf.data.TFRecordDataset).map(_parse_number).repeat(2)
        ),
        r"shuffle\(\) below interleave\(\) and repeat\(\)",
    ),
    "zip": (lambda _: D.zip(D.range(7).shuffle(7, seed=1).repeat(3), D.range(30)), r"zip\(\)"),
    "enumerate": (lambda _: D.range(7).shuffle(7, seed=1).repeat(3).enumerate(), r"zip\(\)"),
    "sample_from_datasets": (
        lambda _: D.sample_from_datasets(
            [D.range(9).repeat(), D.range(99).repeat()], [0.5, 0.5], seed=1
        ).take(30),
        r"directed_interleave\(\)",
    ),
    "concatenate": (
        lambda _: D.range(4).concatenate(D.range(100, 110).shuffle(9, seed=1)).repeat(2),
        r"concatenate\(\)",
    ),
    "shuffle inside interleave": (
        lambda _: (
            D.range(3).interleave(lambda _: D.range(5).shuffle(5, seed=3), cycle_length=2).repeat(2)
        ),
        r"interleave\(\): shuffle\(\)",
    ),
    "a variable that stays": (
        lambda _: _build_with_variable(change=False),
        r"map\(\): ReadVariableOp",
    ),
    "window": (
        lambda _: D.range(9).window(4).flat_map(lambda window: window.batch(4)).repeat(2),
        r"window\(\)",
    ),
}


def _build_counting_function() -> Callable[..., Any]:
    count = [0]

    def step(*_: Any) -> np.int64:
        count[0] += 1
        return np.int64(count[0])

    return step


INEXACT: dict[str, tuple[Make, str]] = {
    "map with random numbers": (
        lambda _: D.range(50).map(_add_random),
        r"map\(\): RandomUniformInt",
    ),
    "random numbers in an interleave": (
        lambda _: D.range(5).interleave(lambda _: D.range(9).map(_add_random)),
        r"interleave\(\): RandomUniformInt",
    ),
    "random_shuffle": (
        lambda _: D.range(50).batch(5).map(tf.random.shuffle),
        r"map\(\): RandomShuffle",
    ),
    "rejection_resample": (
        lambda _: (
            D.range(50)
            .map(lambda value: tf.cast(value % 2, tf.int32))
            .rejection_resample(lambda value: value, [0.2, 0.8], seed=1)
        ),
        "RandomUniform",
    ),
    "random numbers behind a cache": (
        lambda _: D.range(50).map(_add_random).cache(),
        r"map\(\): RandomUniformInt",
    ),
    "a generator of random numbers": (
        lambda _: _build_with_generator(),
        r"map\(\): RngReadAndSkip",
    ),
    "py_function": (
        lambda _: D.range(50).map(
            lambda value: tf.py_function(_build_counting_function(), [value], tf.int64)
        ),
        r"map\(\): EagerPyFunc",
    ),
    "numpy_function": (
        lambda _: D.range(50).map(
            lambda value: tf.numpy_function(_build_counting_function(), [value], tf.int64)
        ),
        r"map\(\): PyFunc",
    ),
    "from_generator": (
        lambda _: D.from_generator(
            lambda: iter([1, 2]), output_signature=tf.TensorSpec([], tf.int64)
        ),
        r"flat_map\(\): PyFunc",
    ),
    "a variable that changes": (
        lambda _: _build_with_variable(change=True),
        r"map\(\): AssignAddVariableOp",
    ),
    "a map in any order": (
        lambda _: D.range(50).map(_add_stateless_random, num_parallel_calls=2, deterministic=False),
        r"map\(\): deterministic=False",
    ),
}


def _build_with_generator() -> tf.data.Dataset:
    generator = tf.random.Generator.from_seed(1)
    KEPT.append(generator)
    return D.range(50).map(lambda value: value * 0 + generator.uniform([], 0, 9, tf.int64))


def _read(iterator: Any, count: int | None = None) -> list[Any]:
    """Returns the next elements, or all that are left."""
    elements = []
    while count is None or len(elements) < count:
        try:
            elements.append(
                tf.nest.map_structure(lambda value: value.numpy().tolist(), next(iterator))
            )
        except StopIteration:
            break

    return elements


def _choose_method(
    dataset: tf.data.Dataset, saved: bool = True, deterministic: bool = False
) -> tuple[str, str]:
    method = choose_resume_method(
        examine_dataset(dataset),
        iterator_obstacle="" if saved else SEVERAL,
        deterministic_ops=deterministic,
    )
    return method.method, "\n".join(method.reasons)


def _make(make: Make, files: list[str]) -> tf.data.Dataset:
    """Returns the dataset as a run makes it: after some random ops, which differ by process."""
    tf.random.uniform([])
    return call_build_inputs(lambda params: make(files), None)


@pytest.mark.parametrize("name", CHAINS)
def test_a_saved_iterator_continues_exactly_at_every_position(
    name: str, files: list[str], tmp_path: Path
) -> None:
    dataset = _make(CHAINS[name], files)

    assert _choose_method(dataset) == ("iterator", "")

    iterator = iter(dataset)
    elements: list[Any] = []
    saved: list[str] = []

    while len(elements) == len(saved):
        saved.append(tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / str(len(saved)))))
        elements += _read(iterator, 1)

    assert len(elements) > 5

    # Made once, since making it costs most of the time: a restored iterator forgets earlier ones.
    resumed_dataset = _make(CHAINS[name], files)

    for position, path in enumerate(saved):
        resumed = iter(resumed_dataset)
        tf.train.Checkpoint(iterator=resumed).read(path).assert_consumed()
        assert _read(resumed) == elements[position:], f"at position {position}"


def test_every_safe_transformation_is_in_a_chain(files: list[str]) -> None:
    kinds = {
        get_transformation_kind(part)
        for make in CHAINS.values()
        for part in iterate_transformations(_make(make, files))
    }

    assert kinds >= dataset_resume._SAFE


@pytest.mark.parametrize("name", [*CHAINS, *SKIPPED])
def test_skipping_continues_exactly(name: str, files: list[str]) -> None:
    make = CHAINS.get(name) or SKIPPED[name][0]
    elements = _read(iter(_make(make, files)))

    for position in (len(elements) // 2, len(elements) - 1):
        assert _read(iter(skip_batches(_make(make, files), position))) == elements[position:]


@pytest.mark.parametrize("name", CHAINS)
def test_reported_datasets_change_their_order_when_read_again(name: str, files: list[str]) -> None:
    dataset = _make(CHAINS[name], files)
    again = _read(iter(dataset)) == _read(iter(dataset))

    assert again == (not examine_dataset(dataset).reshuffled_each_iteration)


@pytest.mark.parametrize("again", [False, True])
def test_new_orders_are_known_for_shuffles_of_large_arrays(again: bool) -> None:
    dataset = D.from_tensor_slices(np.zeros([2, 2**24], np.int8)).shuffle(
        2, seed=1, reshuffle_each_iteration=again
    )

    assert examine_dataset(dataset).reshuffled_each_iteration == (("shuffle()",) if again else ())


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_only_skipped_says_why_and_what_it_costs(name: str, files: list[str]) -> None:
    make, named = SKIPPED[name]
    method, reasons = _choose_method(_make(make, files))

    assert method == "skip"
    assert reasons.startswith("task.train_data: a resumed run reads the data from its start")
    assert re.search(named, reasons), reasons
    assert "TFRecordSource" in reasons


def test_several_replicas_can_only_skip() -> None:
    dataset = D.range(50).shuffle(9, seed=1)
    method, reasons = _choose_method(dataset, saved=False)

    assert method == "skip"
    assert SEVERAL in reasons

    distributed = replicas(2).distribute_datasets_from_function(lambda context: dataset)

    with pytest.raises(ValueError, match="trackable"):
        tf.train.Checkpoint(iterator=iter(distributed))


@pytest.fixture(scope="module")
def inexact(files: list[str]) -> Callable[[str], tf.data.Dataset]:
    """Returns the dataset of a name of INEXACT."""
    return functools.cache(lambda name: _make(INEXACT[name][0], files))


@pytest.mark.parametrize("name", INEXACT)
def test_what_cannot_be_resumed_exactly_is_named(
    name: str, inexact: Callable[[str], tf.data.Dataset]
) -> None:
    named = INEXACT[name][1]
    method, reasons = _choose_method(inexact(name))

    assert method == "inexact"
    assert re.search(named, reasons), reasons
    assert reasons.startswith("task.train_data: resume is not exact")
    assert "ArraySource" in reasons


def test_a_small_last_batch_makes_a_saved_iterator_inexact(tmp_path: Path) -> None:
    """The reason for the rule about shuffle and repeat. This fails if TensorFlow mends it."""
    make: Make = lambda _: D.range(25).shuffle(9, seed=1).batch(4).repeat()  # noqa: E731
    cut = 14  # two passes of 7 batches
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # nothing is read in the background
    options.autotune.enabled = False
    first = iter(_make(make, []).with_options(options))
    _read(first, cut)
    path = tf.train.Checkpoint(iterator=first).write(str(tmp_path / "iterator"))

    resumed = iter(_make(make, []).with_options(options))

    tf.train.Checkpoint(iterator=resumed).read(path).assert_consumed()
    assert _read(resumed, 10) != _read(first, 10)


def test_op_determinism_makes_all_but_python_skippable(
    inexact: Callable[[str], tf.data.Dataset],
) -> None:
    for name in (
        "map with random numbers",
        "rejection_resample",
        "random numbers behind a cache",
        "random_shuffle",
        "a map in any order",
    ):
        method, _ = _choose_method(inexact(name), deterministic=True)
        assert (name, method) in ((name, "skip"), (name, "iterator"))
        assert (method == "iterator") == name.endswith("any order")

    for name in (
        "py_function",
        "from_generator",
        "a variable that changes",
        "a generator of random numbers",
    ):
        assert _choose_method(inexact(name), deterministic=True)[0] == "inexact"


def test_any_order_options_and_unseeded_data_are_named() -> None:
    options = tf.data.Options()
    options.deterministic = False

    # Nothing in it is parallel.
    assert _choose_method(D.range(9).with_options(options).batch(2)) == ("iterator", "")

    method, reasons = _choose_method(
        D.range(9).with_options(options).map(_add_stateless_random, num_parallel_calls=2)
    )
    assert method == "inexact"
    assert "map(): deterministic=False" in reasons

    tf.random.set_seed(None)

    for dataset, named in ((D.range(9).shuffle(9), "shuffle()"), (D.random(), "random()")):
        method, reasons = _choose_method(dataset.batch(2))
        assert method == "inexact"
        assert f"{named} without a seed" in reasons

    assert _choose_method(D.range(9).shuffle(9, seed=1))[0] == "iterator"


def test_op_determinism_repeats_parallel_random_numbers() -> None:
    with ForkServer(["tests.engine.inputs.reading_in_order"]) as server:
        ended = server.run(read_whole_and_skipped)

    assert ended.code == 0, ended.text[-2000:]
