"""The nets and pipelines that all TensorFlow contenders share; used in the measured processes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from scripts.benchmarks.samples import (
    BATCH,
    BLOCKS,
    CLASSES,
    EXAMPLES,
    HEADS,
    LENGTH,
    RATE,
    VOCABULARY,
    WIDTH,
    arrays,
    optimizer_name,
)


def build(library: Any, net: str, size: int = 0) -> Any:
    """Returns a net.

    Args:
      library: keras, or tf_keras for dense, conv and transformer.
      net: dense (64-32-10), conv (32x32 images, two convolutions) or transformer (two causal blocks on 16 tokens);
        wide, of about `size` parameters in three dense layers; many, of `size` short variables; heavy, of `size`
        matrices of 4 MiB.
      size: of wide, many and heavy.
    """
    layers = library.layers
    if net == "dense":
        return library.Sequential([library.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(CLASSES)])
    if net == "conv":
        return library.Sequential(
            [
                library.Input((32, 32, 3)),
                layers.Conv2D(16, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(32, 3, activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(CLASSES),
            ]
        )
    if net == "transformer":
        return _transformer(library)
    if net == "wide":
        side = round((size + 37**2) ** 0.5) - 37  # side * side + 74 * side parameters, and few more
        hidden = [layers.Dense(side, activation="relu") for _ in range(2)]
        return library.Sequential([library.Input((64,)), *hidden, layers.Dense(CLASSES)])
    shape = (1024, 1024) if net == "heavy" else (64,)
    return library.Sequential([library.Input((64,)), ManyVariables(size, shape), layers.Dense(CLASSES)])


class ManyVariables(keras.layers.Layer):
    """Adds to features [batch, 64] the first 64 numbers of each of `count` variables of one shape."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._count, self._shape = count, shape

    def build(self, input_shape: Any) -> None:
        """Creates the variables."""
        self.parts = [self.add_weight(shape=self._shape, name=f"part_{number}") for number in range(self._count)]

    def call(self, inputs: Any) -> Any:
        """Returns the sums."""
        vectors = [tf.convert_to_tensor(part) for part in self.parts]
        return inputs + tf.add_n([vector if len(self._shape) == 1 else vector[0, :64] for vector in vectors])


def _transformer(library: Any) -> Any:
    layers = library.layers
    tokens = library.Input((LENGTH,), dtype="int32")
    features = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(BLOCKS):
        normed = layers.LayerNormalization()(features)
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normed, normed, use_causal_mask=True)
        features = layers.Add()([features, attended])
        hidden = layers.Dense(4 * WIDTH, activation="relu")(layers.LayerNormalization()(features))
        features = layers.Add()([features, layers.Dense(WIDTH)(hidden)])
    return library.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(features)))


def loss(library: Any, labels: Any, logits: Any) -> Any:
    """Returns the mean cross entropy, a scalar; in graph."""
    losses = library.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return tf.reduce_mean(losses)


def accuracies(library: Any, count: int) -> list[Any]:
    """Returns `count` metrics, all the accuracy."""
    return [library.metrics.SparseCategoricalAccuracy(name=f"accuracy_{number}") for number in range(count)]


def optimizer(library: Any, net: str) -> Any:
    """Returns the optimizer of a net."""
    return library.optimizers.get({"class_name": optimizer_name(net), "config": {"learning_rate": RATE}})


def pipeline(net: str, batch: int = BATCH, stack: int = 0) -> tf.data.Dataset:
    """Returns hand-written training data: endless, shuffled, in full batches.

    Args:
      net: The net whose data is returned.
      batch: The number of examples in a batch.
      stack: The number of batches in an element, along an extra first axis; 0: an element is a batch.
    """
    dataset = tf.data.Dataset.from_tensor_slices(arrays(net)).shuffle(EXAMPLES).repeat()
    dataset = dataset.batch(batch, drop_remainder=True)
    if stack:
        dataset = dataset.batch(stack, drop_remainder=True)
    return dataset.prefetch(tf.data.AUTOTUNE)


def one_pass(net: str, examples: int) -> tf.data.Dataset:
    """Returns hand-written validation data: each example once, in order."""
    return tf.data.Dataset.from_tensor_slices(arrays(net, examples)).batch(BATCH).prefetch(tf.data.AUTOTUNE)
