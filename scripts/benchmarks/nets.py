"""The nets, the data and the optimizers that all contenders share.

Used in the measured processes.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH = 32
CLASSES = 10
EXAMPLES = 1797  # as many as there are scanned digits
LEARNING_RATE = 0.01

# Of the transformer.
LENGTH = 16
VOCABULARY = 64
WIDTH = 32
HEADS = 4
BLOCKS = 2


def build(library: Any, net: str, size: int = 0) -> Any:
    """Returns a net.

    Args:
      library: keras, or tf_keras for dense, conv and transformer.
      net: dense (64-32-10), conv (32x32 images, two convolutions) or transformer (two causal blocks
        on 16 tokens); wide, of about `size` parameters in three dense layers; many, of `size` short
        variables.
      size: Of wide and many.
    """
    layers = library.layers
    if net == "dense":
        return library.Sequential(
            [library.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(CLASSES)]
        )
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
    return library.Sequential([library.Input((64,)), ManyVariables(size), layers.Dense(CLASSES)])


class ManyVariables(keras.layers.Layer):
    """Adds `count` variables of 64 numbers to features [batch, 64]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def build(self, input_shape: Any) -> None:
        """Creates the variables."""
        self.parts = [
            self.add_weight(shape=(64,), name=f"part_{number}") for number in range(self._count)
        ]

    def call(self, inputs: Any) -> Any:
        """Returns the sums."""
        return inputs + tf.add_n([tf.convert_to_tensor(part) for part in self.parts])


def _transformer(library: Any) -> Any:
    layers = library.layers
    tokens = library.Input((LENGTH,), dtype="int32")
    features = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(BLOCKS):
        normed = layers.LayerNormalization()(features)
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(
            normed, normed, use_causal_mask=True
        )
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
    return [
        library.metrics.SparseCategoricalAccuracy(name=f"accuracy_{number}")
        for number in range(count)
    ]


def optimizer_name(net: str) -> str:
    """Returns the optimizer's name for a net: adam for the transformer, else sgd."""
    return "adam" if net == "transformer" else "sgd"


def optimizer(library: Any, net: str) -> Any:
    """Returns the optimizer of a net."""
    return library.optimizers.get(
        {"class_name": optimizer_name(net), "config": {"learning_rate": LEARNING_RATE}}
    )


def arrays(net: str, examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Returns random features and labels.

    They are float32 [examples, 64] or [examples, 32, 32, 3] and int32 [examples]. For the
    transformer both are int32 [examples, 16].
    """
    random = np.random.default_rng(0)
    if net == "transformer":
        text = random.integers(0, VOCABULARY, (examples, LENGTH + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]

    shape = (32, 32, 3) if net == "conv" else (64,)
    features = random.random((examples, *shape), np.float32)
    labels = random.integers(0, CLASSES, examples).astype(np.int32)
    return features, labels


def pipeline(net: str, batch: int = BATCH, stack: int = 0) -> tf.data.Dataset:
    """Returns hand-written training data: endless, shuffled, in full batches.

    Args:
      net: The net whose data is returned.
      batch: The number of examples in a batch.
      stack: The number of batches in an element, along an extra first axis; 0: an element is a
        batch.
    """
    dataset = tf.data.Dataset.from_tensor_slices(arrays(net)).shuffle(EXAMPLES).repeat()
    dataset = dataset.batch(batch, drop_remainder=True)
    if stack:
        dataset = dataset.batch(stack, drop_remainder=True)
    return dataset.prefetch(tf.data.AUTOTUNE)


def one_pass(net: str, examples: int) -> tf.data.Dataset:
    """Returns hand-written validation data: each example once, in order."""
    return (
        tf.data.Dataset.from_tensor_slices(arrays(net, examples))
        .batch(BATCH)
        .prefetch(tf.data.AUTOTUNE)
    )
