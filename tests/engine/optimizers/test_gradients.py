"""Clipping, missing and sparse gradients, and equal training on 1, 2 and 4 replicas."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import optimization, replicas
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import Clipping, apply_gradients, clip, scale_loss

GRADIENTS = [np.array([3.0, 4.0], np.float32), np.array([[12.0]], np.float32)]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, GRADIENTS),
        ({"global_clipnorm": 6.5}, [g / 2 for g in GRADIENTS]),
        ({"global_clipnorm": 20.0}, GRADIENTS),
        ({"clipnorm": 6.0}, [GRADIENTS[0], GRADIENTS[1] / 2]),
        ({"clipvalue": 3.5}, [np.array([3.0, 3.5]), np.array([[3.5]])]),
        ({"global_clipnorm": 6.5, "clipnorm": 3.0}, [GRADIENTS[0] / 2, GRADIENTS[1] / 4]),
    ],
)
def test_bounds_hold(bounds: dict[str, float], expected: list[np.ndarray]) -> None:
    clipping = Clipping(**bounds)

    assert clipping.is_active == bool(bounds)

    gradients = clip([tf.constant(gradient) for gradient in GRADIENTS], clipping)
    for clipped, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(clipped, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "bounds", [{"global_clipnorm": 1.0}, {"clipnorm": 1.0}, {"clipvalue": 1.0}]
)
def test_sparse_gradients_are_clipped_like_dense_ones(bounds: dict[str, float]) -> None:
    sparse = tf.IndexedSlices(
        tf.constant([[3.0, 0.0], [0.0, 4.0]]), tf.constant([5, 1]), tf.constant([6, 2])
    )
    (clipped,) = clip([sparse], Clipping(**bounds))
    (dense,) = clip([tf.convert_to_tensor(sparse)], Clipping(**bounds))

    assert isinstance(clipped, tf.IndexedSlices)
    np.testing.assert_allclose(tf.convert_to_tensor(clipped), dense)


def test_half_precision_norms_do_not_overflow() -> None:
    (clipped,) = clip([tf.constant([300.0, 400.0], tf.float16)], Clipping(global_clipnorm=5.0))

    assert clipped.dtype == tf.float16
    np.testing.assert_allclose(clipped, [3.0, 4.0], rtol=2e-3)


def test_clipping_comes_from_the_config() -> None:
    assert Clipping.from_config(OptimizationConfig()) == Clipping()
    assert Clipping.from_config(optimization("sgd", clipvalue=2.0)) == Clipping(clipvalue=2.0)
    assert Clipping.from_config(optimization("adamw")) == Clipping(global_clipnorm=1.0)
    assert Clipping.from_config(optimization("adamw", gradient_clip_norm=0.0)) == Clipping()
    assert Clipping.from_config(optimization("adamw", global_clipnorm=0.5)) == Clipping(
        global_clipnorm=0.5
    )

    both = Clipping.from_config(optimization("adamw", clipnorm=0.5, gradient_clip_norm=2.0))
    assert both == Clipping(clipnorm=0.5, global_clipnorm=2.0)


TOKENS = np.array([1, 1, 2, 5, 1, 0, 5, 5])
TARGETS = np.linspace(-3.0, 3.0, 8, dtype=np.float32)


def train(strategy: Any, make_optimizer: Callable[[], Any], steps: int = 3) -> list[np.ndarray]:
    """Returns the weights of an embedding and a dense layer, trained on 8 examples.

    Tokens repeat among them. The replicas share the examples.
    """
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        ones = keras.initializers.Constant(0.5)
        model = keras.Sequential(
            [
                keras.Input((), dtype="int32"),
                keras.layers.Embedding(6, 3, ones),
                keras.layers.Dense(1, None, True, ones),
            ]
        )
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)
    values = [variable.value for variable in model.trainable_variables]

    def replica_step(index: tf.Tensor) -> None:
        tokens = tf.reshape(tf.gather(tf.reshape(TOKENS, [count, -1]), index), [8 // count])
        targets = tf.reshape(tf.gather(tf.reshape(TARGETS, [count, -1]), index), [8 // count])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(tokens)[:, 0] - targets) ** 2) / count
            loss = scale_loss(optimizer, loss)
        apply_gradients(
            optimizer,
            list(zip(tape.gradient(loss, values), model.trainable_variables, strict=True)),
        )

    def step() -> None:
        strategy.run(
            lambda: replica_step(tf.distribute.get_replica_context().replica_id_in_sync_group)
        )

    run = step
    if count > 1:  # else a few steps take less time than a trace
        run = tf.function(step)
    for _ in range(steps):
        run()

    return [value.numpy() for value in values]


DECAY = {"weight_decay": 0.1, "exclude_from_weight_decay": ("bias",)}
# One of each kind of clipping, of decay, and of an update that is not Keras' own or not element by
# element.
TRAINING: dict[str, dict[str, Any]] = {
    "sgd": {"type": "sgd", "momentum": 0.9, "clipnorm": 0.5},
    "adamw": {
        "type": "adamw",
        "epsilon": 1e-3,
        "weight_decay_rate": 0.1,
        "exclude_from_weight_decay": ("bias",),
        "global_clipnorm": 0.3,
    },
    "lars": {
        "type": "lars",
        "eeta": 0.1,
        "weight_decay_rate": 0.1,
        "exclude_from_weight_decay": ("bias",),
    },
    "adadelta": {"type": "adadelta", "epsilon": 1e-3, "clipvalue": 0.2, **DECAY},
    "muon": {"type": "muon", "exclude_embeddings": False, "epsilon": 1e-3, **DECAY},
    "schedule_free_adamw": {"type": "schedule_free_adamw", "epsilon": 1e-3, **DECAY},
}

ON_FOUR = ("adamw",)  # how gradients are summed, clipped and decayed is that of every optimizer


@pytest.mark.parametrize("case", TRAINING)
def test_replicas_change_nothing(case: str) -> None:
    def make() -> Any:
        return create_optimizer(optimization(**TRAINING[case]))

    count = 4 if case in ON_FOUR else 2
    expected = train(replicas(1), make)
    weights = train(replicas(count), make)

    for weight, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-6, rtol=1e-6)


def test_keras_clip_arguments_bound_the_sum_over_replicas() -> None:
    on_one_replica = train(replicas(1), lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.3))
    on_two_replicas = train(replicas(2), lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.3))

    for weight, wanted in zip(on_two_replicas, on_one_replica, strict=True):
        np.testing.assert_allclose(weight, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        # Keras' sgd and adam stand for those that are Keras' alone: the rows are summed before any
        # of them.
        *(
            (kind, False)
            for kind in (
                "sgd",
                "adam",
                "adamw",
                "lamb",
                "adafactor",
                "lars",
                "muon",
                "schedule_free_adamw",
            )
        ),
        # Keras' one, one that needs all rows, one that is mended.
        *((kind, True) for kind in ("sgd", "lars", "adadelta")),
    ],
)
def test_repeated_rows_of_a_sparse_gradient_count_as_their_sum(kind: str, compiled: bool) -> None:
    sparse = tf.IndexedSlices(
        tf.constant([[1.0, 2], [3, 4], [1, 1]]), tf.constant([1, 1, 2]), tf.constant([4, 2])
    )
    updates = []
    results = []
    for gradient in (sparse, tf.convert_to_tensor(sparse)):
        weights = keras.Variable(np.ones((4, 2)), dtype="float32")
        optimizer = create_optimizer(optimization(kind, global_clipnorm=2.0))
        optimizer.build([weights])
        updates.append(functools.partial(apply_gradients, optimizer, [(gradient, weights)]))
        results.append(weights)

    @functools.partial(tf.function, jit_compile=compiled)
    def step() -> None:
        for update in updates:
            update()

    for _ in range(2):
        step()

    np.testing.assert_allclose(results[0].numpy(), results[1].numpy(), rtol=1e-5)


class Module(tf.Module):
    """A model without Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable([[1.0], [2.0]])
        self.bias = tf.Variable([0.5])

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a linear function of x."""
        return x @ self.kernel + self.bias


def build_tf_keras_model() -> Any:
    """The same function, of tf_keras."""
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(2,))])
    model.set_weights([np.array([[1.0], [2.0]]), np.array([0.5])])
    return model


@pytest.mark.parametrize(
    ("make_model", "kind", "count"),
    [
        *((Module, kind, 1) for kind in ("sgd", "adamw", "lars", "schedule_free_adamw")),
        (Module, "adafactor", 2),
        *((build_tf_keras_model, kind, count) for kind, count in (("adamw", 1), ("adafactor", 2))),
    ],
)
def test_plain_and_tf_keras_models_train_with_keras_3_optimizers(
    make_model: Callable[[], Any], kind: str, count: int
) -> None:
    strategy = replicas(count)
    with strategy.scope():
        model = make_model()
        optimizer = create_optimizer(optimization(kind, 0.01, clipnorm=1.0))
        optimizer.build(model.trainable_variables)

    @tf.function
    def step() -> Any:
        def replica_step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.constant([[1.0, 1.0]])) ** 2)
                share = loss / count
            gradients = tape.gradient(share, model.trainable_variables)
            apply_gradients(optimizer, list(zip(gradients, model.trainable_variables, strict=True)))
            return loss

        return strategy.experimental_local_results(strategy.run(replica_step))[0]

    losses = [float(step()) for _ in range(5)]

    assert losses[0] == pytest.approx(3.5**2)
    assert losses == sorted(losses, reverse=True)


def test_a_variable_without_a_gradient_is_named_once_and_kept() -> None:
    used = keras.Variable([1.0], name="used")
    unused = keras.Variable([1.0], name="unused")
    optimizer = create_optimizer(optimization("sgd", momentum=0.9))
    step = tf.function(lambda: apply_gradients(optimizer, [(tf.ones(1), used), (None, unused)]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            step()

    assert [str(w.message) for w in caught] == [
        "these variables have no gradient and are not trained: unused"
    ]
    assert used.numpy() == pytest.approx(0.71)
    assert unused.numpy() == 1.0

    apply_gradients(optimizer, [(tf.ones(1), used), (tf.ones(1), unused)])

    assert unused.numpy() == pytest.approx(0.9)


@pytest.mark.parametrize("count", [0, 2])
def test_no_gradient_at_all_is_an_error(count: int) -> None:
    with pytest.raises(UsageError):
        apply_gradients(
            create_optimizer(optimization("sgd")), [(None, keras.Variable(1.0))] * count
        )


def test_an_unbuilt_optimizer_is_built_inside_a_graph_loop() -> None:
    weights = keras.Variable([4.0])
    optimizer = create_optimizer(optimization("sgd", 1.0, momentum=0.5))

    @tf.function
    def loop() -> None:
        for _ in tf.range(2):
            apply_gradients(optimizer, [(tf.ones(1), weights)])

    loop()

    np.testing.assert_allclose(weights.numpy(), [4.0 - 1.0 - 1.5])


def test_without_a_scale_a_loss_is_left_alone() -> None:
    assert float(scale_loss(create_optimizer(optimization("sgd")), tf.constant(2.0))) == 2.0
    assert float(scale_loss(object(), tf.constant(2.0))) == 2.0


def test_no_operation_joins_the_gradients_of_one_replica() -> None:
    """TensorFlow takes such an operation for an order of reads and updates, and removes it."""
    variables = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)

    @tf.function
    def step(values: list[tf.Tensor]) -> None:
        apply_gradients(
            optimizer, list(zip([2.0 * value for value in values], variables, strict=True))
        )

    graph = step.get_concrete_function([tf.constant([1.0]), tf.constant([3.0])]).graph

    assert "IdentityN" not in {operation.type for operation in graph.get_operations()}
