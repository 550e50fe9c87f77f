"""The batches of a split: which examples, in which order, and what comes after a restart."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.compat.pipelines.data_sets import (
    TRAIN,
    VALID,
    serialize_example,
    write_data_set,
    write_examples,
)
from trainer_kit.compat.keras.training_data import build_training_data
from trainer_kit.compat.pipelines import (
    TFRECORD_FEATURES,
    get_labels,
    get_tfrecord_dataset,
    get_train_ds,
    get_valid_ds,
    preprocess_image,
)
from trainer_kit.errors import DataError, UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_set(tmp_path_factory.mktemp("data"))


def read_tfrecord(example: Any, size: int, label_list: list[str]) -> Any:
    """Returns the image and the label of a record, as the sample of the original does."""
    parsed = tf.io.parse_single_example(example, TFRECORD_FEATURES)
    image = preprocess_image(tf.image.decode_image(parsed["image"], channels=3), size)
    return image, tf.cast(tf.where(label_list == parsed["label"])[0], tf.float32)


def decode_number(example: Any) -> tf.Tensor:
    """Returns the number that the pixels of a record have, uint8 []."""
    image = tf.io.parse_single_example(example, TFRECORD_FEATURES)["image"]
    return tf.io.decode_png(image)[0, 0, 0]


def read_numbers(dataset: tf.data.Dataset) -> list[int]:
    return [int(number) for batch in dataset.as_numpy_iterator() for number in batch]


def get_number_dataset(folder: Path, size: int = 8, **options: Any) -> tf.data.Dataset:
    return get_tfrecord_dataset(str(folder), decode_number, size, "train", **options)


# ---- examples and batches


def test_images_and_labels_come_in_batches_of_known_shape(folder: Path) -> None:
    count, labels = get_labels(folder)

    dataset = get_train_ds(folder, functools.partial(read_tfrecord, size=4, label_list=labels), 8)

    images, classes = dataset.element_spec
    assert images.shape == (8, 4, 4, 3)
    assert images.dtype == tf.float32
    assert classes.shape == (8, 1)
    assert {int(label) for _, batch in dataset for label in batch[:, 0]} == set(range(count))


def test_each_pass_has_all_examples_in_another_order(folder: Path) -> None:
    dataset = get_number_dataset(folder)
    first = read_numbers(dataset)
    second = read_numbers(dataset)

    assert sorted(first) == sorted(second) == list(range(TRAIN))
    assert first != second != sorted(second)
    # Without the smaller last batch.
    assert len(read_numbers(get_number_dataset(folder, 9))) == 36


def test_validation_is_in_the_order_of_the_files(folder: Path) -> None:
    dataset = get_valid_ds(folder, decode_number, 4)
    assert read_numbers(dataset) == list(range(100, 100 + VALID))
    assert [len(batch) for batch in dataset.as_numpy_iterator()] == [4, 4, 2]


def test_is_train_says_the_split(folder: Path) -> None:
    training = get_tfrecord_dataset(folder, decode_number, 4, is_train=True)
    validation = get_tfrecord_dataset(folder, decode_number, 4, is_train=False)

    assert len(read_numbers(training)) == TRAIN
    assert len(read_numbers(validation)) == VALID


def test_a_share_of_the_classes_is_read(folder: Path) -> None:
    count, labels = get_labels(folder, 50)
    parse = functools.partial(read_tfrecord, size=4, label_list=labels)

    dataset = get_train_ds(folder, parse, 5, 50)

    assert count == 2
    assert len(dataset) == 4
    assert {int(label) for _, batch in dataset for label in batch[:, 0]} == {0, 1}
    validation = read_numbers(get_valid_ds(folder, decode_number, 5, 50))
    assert validation == [100, 101, 104, 105, 108, 109]


def test_augmentation_is_for_training_only(folder: Path) -> None:
    options: Any = {"data_augmentation": lambda number: number + 100}
    validation = get_tfrecord_dataset(folder, decode_number, 5, "valid", **options)

    assert min(read_numbers(get_number_dataset(folder, **options))) == 100
    assert read_numbers(validation)[0] == 100


# ---- orders


def test_the_order_follows_from_the_global_seed_alone(folder: Path) -> None:
    def read_order(seed: int) -> list[int]:
        tf.random.set_seed(seed)
        return read_numbers(get_number_dataset(folder))

    first = read_order(1)
    other = read_order(2)
    tf.random.set_seed(1)
    tf.random.uniform([3])
    assert read_numbers(get_number_dataset(folder)) == first != other
    tf.random.set_seed(None)
    assert read_numbers(get_number_dataset(folder)) == read_numbers(get_number_dataset(folder))


def build_epochs(folder: Path) -> Any:
    """Returns what a new process trains on: data that a user has transformed and augmented."""
    tf.random.set_seed(3)
    parse = functools.partial(read_tfrecord, size=4, label_list=get_labels(folder)[1])

    def add_noise(image: Any, label: Any) -> Any:
        return image + tf.random.uniform([], seed=1), label

    dataset = get_tfrecord_dataset(folder, parse, 8, "train", add_noise)
    some_labels = dataset.unbatch().filter(lambda _, label: label[0] < 3)
    batches = some_labels.shuffle(6, seed=5).batch(4, drop_remainder=True)
    return build_training_data(batches.prefetch(2)).batches


def read_batches_from(epochs: Any, position: int) -> list[bytes]:
    """Returns the batches of a pass from a position on."""
    epochs.prepare_pass(position, has_iterator=False)
    return [
        image.tobytes() + label.tobytes()
        for image, label in epochs.at(position).as_numpy_iterator()
    ]


def test_a_restart_goes_on_with_the_same_batches(folder: Path) -> None:
    whole = build_epochs(folder)
    restarted = build_epochs(folder)

    first, second, third = (read_batches_from(whole, position) for position in (0, 7, 14))

    assert first != second != third
    assert read_batches_from(restarted, 10) == second[3:]  # from the middle of the second pass
    assert read_batches_from(restarted, 14) == third
    reasons = "".join(whole.resumption(deterministic_ops=False).reasons)
    assert "data_augmentation add_noise (test_tfrecords.py:" in reasons
    assert "RandomUniform" in reasons


# ---- mistakes


def test_missing_files_are_told_with_what_is_there(folder: Path, tmp_path: Path) -> None:
    message = r"no file matches .*/tran-\*\.tfrec; .* did you mean train-"
    with pytest.raises(FileNotFoundError, match=message):
        get_tfrecord_dataset(folder, decode_number, 4, "tran")

    (tmp_path / "train_00001.tfrec").touch()
    with pytest.raises(DataError, match=r"did you mean train_00001\.tfrec"):
        get_train_ds(tmp_path, decode_number, 4)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        get_train_ds(tmp_path / "none", decode_number, 4)


def test_files_that_hold_no_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train-0.tfrec"
    path.touch()

    with pytest.raises(DataError, match=r"matches only empty files, without a record"):
        get_train_ds(tmp_path, decode_number, 4)

    path.write_text("this is no file of records")
    with pytest.raises(DataError, match=r"train-0\.tfrec: at offset 0 there is no record"):
        get_train_ds(tmp_path, decode_number, 4)

    write_examples(path, range(5), "GZIP")
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(DataError, match=r"train-0\.tfrec cannot be read: DataLossError"):
        get_train_ds(tmp_path, decode_number, 4)


def test_a_batch_beyond_the_data_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=f"has {TRAIN} examples, and a batch 41"):
        get_number_dataset(folder, 41)
    assert len(get_valid_ds(folder, decode_number, 41)) == 1


def test_a_share_needs_labels_in_the_records(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "train-0.tfrec")) as writer:
        writer.write(serialize_example(1).replace(b"label", b"lobel"))
    (tmp_path / "labels.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match="needs the feature 'label'"):
        get_train_ds(tmp_path, decode_number, 1, 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Give either split='train' or split='valid'"),
        ({"split": "train", "is_train": False}, "which files"),
        ({"split": "train/*"}, "not the first part of the names"),
        ({"split": "train", "global_batch_size": 0}, "global_batch_size=0"),
        ({"split": "train", "percentage": 0.5}, "give 100 for all classes, 50 for half"),
        ({"split": "train", "dataset_path": "gs://bucket/data"}, "is remote"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    arguments = {
        "dataset_path": folder,
        "preprocessing": decode_number,
        "global_batch_size": 4,
        **options,
    }
    with pytest.raises(UsageError, match=message.replace("*", r"\*")):
        get_tfrecord_dataset(**arguments)


def test_damage_in_a_record_is_no_silent_loss(tmp_path: Path) -> None:
    write_examples(tmp_path / "valid-0.tfrec", range(5))
    content = bytearray((tmp_path / "valid-0.tfrec").read_bytes())
    content[40] ^= 1
    (tmp_path / "valid-0.tfrec").write_bytes(content)

    with pytest.raises(tf.errors.DataLossError):
        np.asarray(read_numbers(get_valid_ds(tmp_path, decode_number, 2)))
