"""TFRecord files as a Source: ArraySource's order on any replicas, and errors with a place."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import (
    input_context,
    read_batches,
    replicas,
    training_data,
    validation_data,
    write_records,
)
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.inputs.sources.tfrecords import TFRecordSource, find_data_error

EXAMPLES = 23
BATCH = 4
DATA = {True: training_data(), False: validation_data(seed=7)}
FEATURES = {
    "number": tf.io.FixedLenFeature([], tf.int64),
    "name": tf.io.FixedLenFeature([], tf.string),
}


def _write_example(number: int) -> bytes:
    features = {
        "number": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n%d" % number])),
    }
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three files that hold the examples 0 to 22 in sorted order."""
    folder = tmp_path_factory.mktemp("records")
    for name, numbers in (("a", range(5)), ("b", range(5, 6)), ("c", range(6, EXAMPLES))):
        write_records(folder / name, map(_write_example, numbers))
    return f"{folder}/*"


def _parse(serialized: tf.Tensor) -> Any:
    return tf.io.parse_example(serialized, FEATURES)


def _create_source(pattern: str, params: DataConfig) -> TFRecordSource:
    return TFRecordSource(
        pattern, params, parse=_parse, batch_transform=lambda batch: batch["number"]
    )


@pytest.mark.parametrize(
    ("training", "position"), [(True, 1), (True, 1_000_003), (False, 1), (False, 6)]
)
def test_the_order_is_that_of_arrays_from_any_position(
    pattern: str, training: bool, position: int
) -> None:
    params = DATA[training]
    expected = read_batches(ArraySource(np.arange(EXAMPLES), params).at(position), 14)

    assert read_batches(_create_source(pattern, params).at(position), 14) == expected
    assert bool(expected) == (training or position < 6)


@pytest.mark.parametrize("training", [True, False])
def test_replicas_together_get_the_batches_of_one(pattern: str, training: bool) -> None:
    """Two workers with two replicas each."""
    source = _create_source(pattern, DATA[training])
    read = [
        read_batches(source.at(1, input_context(4, 2, pipeline)), 8 * 2) for pipeline in range(2)
    ]
    joined = [
        list(itertools.chain(*(part for share in read for part in share[k : k + 2])))
        for k in range(0, len(read[0]), 2)
    ]

    assert joined == read_batches(source.at(1), 8)


def test_parse_gets_a_static_batch_of_serialized_examples(pattern: str) -> None:
    batches: list[Any] = []

    def parse(serialized: tf.Tensor) -> Any:
        batches.append((serialized.dtype, serialized.shape.as_list()))
        return _parse(serialized)

    dataset = TFRecordSource(pattern, training_data(), parse=parse).at(0)

    assert batches == [(tf.string, [BATCH])]
    assert dataset.element_spec["number"].shape == [BATCH]
    assert int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY

    batch = next(iter(dataset))
    assert [b"n%d" % number for number in batch["number"].numpy()] == batch["name"].numpy().tolist()


def test_a_pass_knows_its_length_and_a_block_stays_together(pattern: str) -> None:
    assert int(_create_source(pattern, validation_data()).at(2).cardinality()) == 4

    blocks = _create_source(pattern, training_data(batch=1, block_length=5))
    stream = list(itertools.chain(*read_batches(blocks.at(0), EXAMPLES)))
    assert sorted(stream) == list(range(EXAMPLES)) != stream
    assert stream[stream.index(5) : stream.index(5) + 5] == [5, 6, 7, 8, 9]


def test_reading_a_damaged_record_names_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "a"
    size = len(_write_example(0)) + 16
    write_records(path, map(_write_example, range(4)))
    content = bytearray(path.read_bytes())
    content[2 * size + 20] ^= 1
    path.write_bytes(content)

    source = _create_source(str(path), validation_data(batch=1))

    assert read_batches(source.at(0), 2) == [[0], [1]]

    with pytest.raises(tf.errors.OpError) as caught:
        read_batches(source.at(2), 1)

    error = find_data_error(caught.value)
    assert isinstance(error, DataError)
    assert str(error) == f"{path}: the record at offset {2 * size} is damaged: its checksum differs"
    assert read_batches(source.at(3)) == [[3]]


def _cut_file(tmp_path: Path) -> tf.data.Dataset:
    """TensorFlow's own reader, over a damaged file."""
    write_records(tmp_path / "cut", [b"x" * 50])
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-1] + b"?")
    # Else a second replica might tell of the end first.
    return tf.data.TFRecordDataset(4 * [str(tmp_path / "cut")])


def _build_unparsed(tmp_path: Path) -> tf.data.Dataset:
    features = {"number": tf.io.FixedLenFeature([], tf.int64)}
    texts = tf.data.Dataset.from_tensors(b"?").repeat(4)
    return texts.map(lambda text: tf.io.parse_single_example(text, features)["number"])


@tf.function
def _loop_over_next(iterator: Any) -> None:
    for _ in tf.range(3):
        next(iterator)


@tf.function
def _loop_over_optional(iterator: Any) -> None:
    for _ in tf.range(3):
        iterator.get_next_as_optional()


def _distribute_over_two(dataset: tf.data.Dataset) -> Any:
    return iter(replicas(2).distribute_datasets_from_function(lambda context: dataset))


_BEGINS = (iter, _distribute_over_two)


@pytest.mark.parametrize(
    ("make", "reason", "read", "begin"),
    [
        *(
            (_cut_file, "corrupted record at 12", *way)
            for way in itertools.product([next, _loop_over_next, _loop_over_optional], _BEGINS)
        ),
        *(
            (_build_unparsed, "Could not parse example", *way)
            for way in ((next, iter), (_loop_over_next, _distribute_over_two))
        ),
    ],
)
def test_what_fails_inside_a_plain_dataset_is_told_in_one_line(
    make: Any, reason: str, read: Any, begin: Any, tmp_path: Path
) -> None:
    with pytest.raises(tf.errors.OpError) as caught:
        read(begin(make(tmp_path)))

    error = str(find_data_error(caught.value))
    assert error.startswith("the data cannot be read: ")
    assert reason in error
    assert not re.search(r"\n|node|\[Op:|INVALID|DATA_LOSS|Graph execution", error)


# As TensorFlow 2.20 words it on two devices; which op the line after the failed one names differs
# from call to call.
_ELSEWHERE = """Graph execution error:

Detected at node while/assert_less/Assert/AssertGuard/Assert defined at (most recent call last):
2 root error(s) found.
  (0) INVALID_ARGUMENT:  assertion failed: [x (while/assert_less/ReadVariableOp:0) = ] [3]
\t [[{{node while/assert_less/Assert/AssertGuard/Assert}}]]
\t [[%s]]
  (1) INVALID_ARGUMENT:  assertion failed: [x (while/assert_less/ReadVariableOp:0) = ] [3]
\t [[{{node while/assert_less/Assert/AssertGuard/Assert}}]]
0 successful operations.
0 derived errors ignored. [Op:__inference_e_135]"""


@pytest.mark.parametrize(
    "waiting", ["IteratorGetNext/_2", "while/body/_1/while/IteratorGetNext_1/_16", "Identity/_6"]
)
def test_a_failure_that_the_data_only_waits_for_is_no_damage(waiting: str) -> None:
    assert find_data_error(tf.errors.InvalidArgumentError(None, None, _ELSEWHERE % waiting)) is None


def test_what_fails_in_a_step_on_two_devices_is_no_damage() -> None:
    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        batch = next(iterator)
        tf.debugging.assert_less(batch, tf.constant(0, tf.int64))
        with tf.device("CPU:1"):
            return 2 * batch

    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed") as caught:
        step(iter(tf.data.Dataset.range(9)))

    assert find_data_error(caught.value) is None


def test_only_errors_of_the_data_are_taken_for_damage() -> None:
    assert find_data_error(ValueError("DataError: x")) is None
    assert find_data_error(tf.errors.InvalidArgumentError(None, None, "shape")) is None


@pytest.mark.parametrize(
    ("name", "params", "error"),
    [
        ("/none", training_data(), DataError),
        ("", training_data(24), DataError),
        ("", training_data(autotune_algorithm="x"), UsageError),
        ("", training_data(4), UsageError),
    ],
    ids=["no file", "too few examples", "algorithm", "not for 3 replicas"],
)
def test_errors_of_files_and_config_come_when_it_is_made(
    pattern: str, name: str, params: DataConfig, error: type[Exception]
) -> None:
    with pytest.raises(error):
        _create_source(pattern + name, params).at(0, input_context(3))


def test_unread_fields_are_named_once(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    _create_source(
        pattern, training_data(input_path=pattern, block_length=2, prefetch_buffer_size=1)
    )

    assert caplog.records == []

    # The source is opened again after a rewind.
    for _ in range(2):
        _create_source(pattern, training_data(cycle_length=4, cache=True))

    assert caplog.text.count("TFRecordSource does not read cache, cycle_length") == 1
