"""A small data set as the components of a pipeline find it: files of records, and labels.txt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

LABELS = ["犬", "猫", "tree frog", "ぞう"]
# Examples of each split.
TRAIN = 40
VALID = 10


def serialize_example(number: int) -> bytes:
    """Returns a serialized example: an image [3, 5, 3] of pixels with the number, and its label."""
    image = tf.io.encode_png(np.full((3, 5, 3), number, "uint8")).numpy()
    features = {"image": image, "label": LABELS[number % len(LABELS)].encode()}
    lists = {name: tf.train.BytesList(value=[value]) for name, value in features.items()}
    named = {name: tf.train.Feature(bytes_list=value) for name, value in lists.items()}
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()


def write_examples(path: Path, numbers: Iterable[int], compression: str = "") -> None:
    """Writes the examples of some numbers to a file."""
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for number in numbers:
            writer.write(serialize_example(number))


def write_data_set(folder: Path) -> Path:
    """Writes 4 files of training examples, of which two are compressed, an empty one, and 2 files
    of others.
    """
    for file, compression in enumerate(["", "GZIP", "ZLIB", ""]):
        write_examples(folder / f"train-{file:05}.tfrec", range(file, TRAIN, 4), compression)
    (folder / "train-00004.tfrec").touch()
    for file in range(2):
        write_examples(folder / f"valid-{file:05}.tfrec", range(100 + 5 * file, 105 + 5 * file))
    (folder / "labels.txt").write_text("".join(f"{label}\r\n" for label in LABELS) + "\r\n")
    return folder
