"""Programs of Keras's guides, small: functions that return a compiled model, and the data that they
train on.

Keras would compile them with XLA, which takes longer than the rest of a test; one program asks for
it.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

_RANDOM = np.random.RandomState(0)
X = _RANDOM.randn(100, 8).astype("float32")
Y = _RANDOM.randint(0, 3, 100)
WEIGHTS = _RANDOM.rand(100).astype("float32")
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(*hidden: Any, **options: Any) -> Any:
    """Returns a model of one layer behind `hidden`, by default dropout: what is traced takes most
    of a fit's time.
    """
    model = keras.Sequential(
        [keras.Input((8,)), *(hidden or [layers.Dropout(0.3)]), layers.Dense(3)]
    )
    model.compile(**{"optimizer": "sgd", "loss": CROSSENTROPY, "jit_compile": False, **options})
    return model


def linear(**options: Any) -> Any:
    """Returns a model of one layer, whose weights, and orders of arrays, come from one seed."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(3, name="dense")], name="linear")
    settings = {
        "optimizer": "sgd",
        "loss": CROSSENTROPY,
        "jit_compile": False,
        **options,
    }
    model.compile(**settings)
    return model


def assert_same_history(history: Any, expected: Any) -> None:
    """Checks that two histories have the same names and epochs and, to 1e-6, the same values."""
    assert history.epoch == expected.epoch
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(
            history.history[name], values, rtol=1e-6, atol=1e-6, err_msg=name
        )


def assert_same_weights(model: Any, expected: Any) -> None:
    """Checks that two models have the same weights, bit by bit."""
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


class AddedLoss(keras.Model):
    """A subclassed model that is not built yet and adds a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs_layer = layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.01 * tf.reduce_mean(inputs**2))
        return self.outputs_layer(inputs)


def added_loss() -> Any:
    """Returns a model whose layer is built by its first batch."""
    model = AddedLoss()
    model.compile("adam", CROSSENTROPY, jit_compile=False)
    return model


class CustomStep(keras.Model):
    """A model whose steps return plain scalars, nested ones among them; an evaluation reports no
    loss.
    """

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norms": {"gradient": tf.linalg.global_norm(gradients)}}

    def test_step(self, data: Any) -> dict[str, Any]:
        return {"highest": tf.reduce_max(self(data[0]))}


def custom_step() -> Any:
    """Returns a functional model with steps of its own."""
    inputs = keras.Input((8,))
    model = CustomStep(inputs, layers.Dense(3)(inputs))
    model.compile("sgd", CROSSENTROPY, jit_compile=False)
    return model


class Gan(keras.Model):
    """Two models, two optimizers in `compile`, and metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(8)])
        self.discriminator = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.seeds = keras.random.SeedGenerator(1)

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss: Any) -> None:
        super().compile(jit_compile=False)
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_function = loss

    def train_step(self, real: Any) -> dict[str, Any]:
        size = tf.shape(real)[0]

        fake = self.generator(keras.random.normal((size, 4), seed=self.seeds))
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_function(labels, self.discriminator(tf.concat([fake, real], 0)))
        variables = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(
            zip(tape.gradient(d_loss, variables), variables, strict=True)
        )

        noise = keras.random.normal((size, 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            g_loss = self.loss_function(
                tf.zeros((size, 1)), self.discriminator(self.generator(noise))
            )
        variables = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(
            zip(tape.gradient(g_loss, variables), variables, strict=True)
        )

        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def gan() -> Any:
    """Returns a GAN."""
    model = Gan()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(3e-4), keras.optimizers.SGD(3e-4), loss)
    return model


def two_outputs() -> Any:
    """Returns a functional model with two inputs and two outputs."""
    a = keras.Input((8,), name="a")
    b = keras.Input((8,), name="b")
    both = layers.concatenate([a, b])
    model = keras.Model(
        [a, b], {"p": layers.Dense(3, name="p")(both), "q": layers.Dense(1, name="q")(both)}
    )
    model.compile(
        "sgd",
        loss={"p": CROSSENTROPY, "q": "mse"},
        loss_weights={"p": 1.0, "q": 0.2},
        metrics={"p": ["accuracy"], "q": ["mae"]},
        jit_compile=False,
    )
    return model


class Batches(keras.utils.PyDataset):
    """Five batches by their numbers."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        part = slice(number * 20, number * 20 + 20)
        # Copies: TensorFlow may write to a view, in dropout on two replicas.
        return X[part].copy(), Y[part].copy()


def endless_batches() -> Any:
    """Yields batches without end."""
    batches = Batches()
    while True:
        yield from (batches[number] for number in range(len(batches)))


def pairs() -> tf.data.Dataset:
    """Returns examples one by one."""
    return tf.data.Dataset.from_tensor_slices((X, Y))
