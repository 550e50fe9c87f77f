"""What the makers of data share: TFRecord files of examples that look like something, the same for
the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

DATA_SEED = 20


def generator(part: str) -> np.random.Generator:
    """The numbers of one part of the data, such as "train"."""
    return np.random.default_rng([DATA_SEED, *part.encode()])


def integers(values: Iterable[int]) -> tf.train.Feature:
    """A feature of whole numbers."""
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value) for value in values]))


def floats(values: Iterable[float]) -> tf.train.Feature:
    """A feature of floating-point numbers."""
    return tf.train.Feature(float_list=tf.train.FloatList(value=[float(value) for value in values]))


def strings(values: Iterable[bytes]) -> tf.train.Feature:
    """A feature of bytes."""
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=list(values)))


def example(**features: tf.train.Feature) -> tf.train.Example:
    """A tf.train.Example; a name with slashes goes in as `**{"image/encoded": ...}`."""
    return tf.train.Example(features=tf.train.Features(feature=features))


def write_records(path: Path, examples: Iterable[Any]) -> None:
    """Writes the examples to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in examples:
            writer.write(record.SerializeToString())


def write_shards(folder: Path, part: str, examples: Sequence[Any], shards: int = 1) -> None:
    """Writes the examples to `shards` files, `<part>-0.tfrecord` and so on."""
    for shard in range(shards):
        write_records(folder / f"{part}-{shard}.tfrecord", examples[shard::shards])


def image(random: np.random.Generator, label: int, size: int) -> np.ndarray:
    """A noisy image whose colour tells its label, so that there is something to learn."""
    colour = np.array([60 + 35 * (label % 4), 200 - 30 * label % 150, 100 + 20 * label % 100])
    noise = random.integers(-40, 41, size=(size, size, 3))
    return np.clip(colour + noise, 0, 255).astype(np.uint8)


def jpeg(pixels: np.ndarray) -> bytes:
    """The image as a JPEG."""
    encoded: bytes = tf.io.encode_jpeg(pixels, quality=95).numpy()
    return encoded
