"""Layers, scopes, regularization, gradient processors and optimizer wrappers, each used once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trainer_kit.compat.tensorpack.models import (
    BatchNorm,
    Conv2D,
    FullyConnected,
    LinearWrap,
    l2_regularizer,
    layer_register,
    regularize_cost,
    regularize_cost_from_collection,
)
from trainer_kit.compat.tensorpack.tfutils.argscope import argscope, enable_argscope_for_module
from trainer_kit.compat.tensorpack.tfutils.scope_utils import (
    auto_reuse_variable_scope,
    cached_name_scope,
    under_name_scope,
)
from trainer_kit.compat.tensorpack.tfutils.varreplace import (
    custom_getter_scope,
    freeze_variables,
    remap_variables,
)

from trainer_kit.compat.tensorpack import TowerContext, models, tfv1
from trainer_kit.compat.tensorpack.tfutils import gradproc, optimizer

tf = tfv1
IMAGES = np.random.RandomState(0).rand(2, 8, 8, 4).astype(np.float32)
NORM = ["l/gamma:0", "l/beta:0"]
AVERAGES = ["l/mean/EMA:0", "l/variance/EMA:0"]

# By name: the layer, the shape of its output and its variables.
LAYERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], list[str]]] = {
    "Conv2D": (lambda x: Conv2D("l", x, 8, 3), (2, 8, 8, 8), ["l/W:0", "l/b:0"]),
    "split": (lambda x: Conv2D("l", x, 8, 3, split=2), (2, 8, 8, 8), ["l/W:0", "l/b:0"]),
    "strides": (
        lambda x: Conv2D("l", x, 8, 3, strides=2, use_bias=False, activation=tf.nn.relu),
        (2, 4, 4, 8),
        ["l/W:0"],
    ),
    "Conv2DTranspose": (
        lambda x: models.Conv2DTranspose("l", x, 8, 3, strides=2),
        (2, 16, 16, 8),
        ["l/W:0", "l/b:0"],
    ),
    "FullyConnected": (lambda x: FullyConnected("l", x, 5), (2, 5), ["l/W:0", "l/b:0"]),
    "MaxPooling": (lambda x: models.MaxPooling("l", x, 2), (2, 4, 4, 4), []),
    "AvgPooling": (lambda x: models.AvgPooling("l", x, 2), (2, 4, 4, 4), []),
    "GlobalAvgPooling": (lambda x: models.GlobalAvgPooling("l", x), (2, 4), []),
    "FixedUnPooling": (lambda x: models.FixedUnPooling("l", x, 2), (2, 16, 16, 4), []),
    "BatchNorm": (lambda x: BatchNorm("l", x), (2, 8, 8, 4), [*NORM, *AVERAGES]),
    "no_scale": (lambda x: BatchNorm("l", x, center=False, scale=False), (2, 8, 8, 4), AVERAGES),
    "internal": (
        lambda x: BatchNorm("l", x, ema_update="internal"),
        (2, 8, 8, 4),
        [*NORM, *AVERAGES],
    ),
    "BatchRenorm": (
        lambda x: models.BatchRenorm("l", x, rmax=3, dmax=5),
        (2, 8, 8, 4),
        [
            *NORM,
            "l/moving_mean:0",
            "l/moving_variance:0",
            "l/moving_stddev:0",
            "l/renorm_mean:0",
            "l/renorm_stddev:0",
        ],
    ),
    "LayerNorm": (lambda x: models.LayerNorm("l", x), (2, 8, 8, 4), NORM[::-1]),
    "InstanceNorm": (lambda x: models.InstanceNorm("l", x), (2, 8, 8, 4), NORM[::-1]),
    "BNReLU": (
        lambda x: models.BNReLU("l", x),
        (2, 8, 8, 4),
        ["l/bn/gamma:0", "l/bn/beta:0", "l/bn/mean/EMA:0", "l/bn/variance/EMA:0"],
    ),
    "PReLU": (lambda x: models.PReLU("l", x), (2, 8, 8, 4), ["l/alpha:0"]),
    "Dropout": (lambda x: models.Dropout("l", x, keep_prob=0.5), (2, 8, 8, 4), []),
    "ConcatWith": (lambda x: models.ConcatWith("l", x, x, 3), (2, 8, 8, 8), []),
}

# Those whose inference differs from their training.
DIFFERENT_IN_TRAINING = ["BatchNorm", "no_scale", "internal", "BatchRenorm", "BNReLU", "Dropout"]


@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, True) for name in LAYERS), *((name, False) for name in DIFFERENT_IN_TRAINING)],
)
def test_layer_has_gradients_and_variables(name: str, training: bool) -> None:
    build, shape, names = LAYERS[name]
    images = tf.placeholder(tf.float32, (None, 8, 8, 4))
    with TowerContext("" if training else "tower", is_training=training):
        output = build(images)
    gradients = tf.gradients(output, [images, *tf.trainable_variables()])

    values = tf.Session().run([output, *gradients], {images: IMAGES})

    assert values[0].shape == shape
    assert all(np.isfinite(value).all() for value in values)
    assert [variable.name for variable in tf.global_variables()] == names
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    moves = training and name in ("BatchNorm", "no_scale", "BatchRenorm", "BNReLU")
    assert len(updates) == (2 if moves else 0)


def test_batch_norm_moves_its_averages() -> None:
    features = tf.ones([4, 3]) * 2
    with TowerContext("", is_training=True):
        BatchNorm("bn", features, momentum=0.5)
    tf.layers.batch_normalization(features, training=True, momentum=0.5, name="layer")

    session = tf.Session()
    session.run(tf.get_collection(tf.GraphKeys.UPDATE_OPS))

    averages = [item for item in tf.global_variables() if "mean" in item.name]
    values = session.run(averages)
    assert [item.name for item in averages] == ["bn/mean/EMA:0", "layer/moving_mean:0"]
    np.testing.assert_array_equal(values, np.ones((2, 3)))


def test_argscope_and_linear_wrap_set_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module gets its functions back after the test.
    for name, function in vars(tf.layers).copy().items():
        monkeypatch.setattr(tf.layers, name, function)
    enable_argscope_for_module(tf.layers)
    images = tf.ones([2, 8, 8, 3])
    with (
        TowerContext("", is_training=True),
        argscope([Conv2D, tf.layers.conv2d], kernel_size=3, use_bias=False),
    ):
        output = (
            LinearWrap(images)
            .Conv2D("first", 4)
            .tf.nn.relu()
            .MaxPooling("pool", 2)
            .apply(tf.layers.conv2d, 5, name="second")
            .FullyConnected("last", 6)()
        )

    assert output.shape.as_list() == [2, 6]
    names = [variable.name for variable in tf.trainable_variables()]
    assert names == ["first/W:0", "second/kernel:0", "last/W:0", "last/b:0"]


def test_own_layer_is_registered() -> None:
    @layer_register(log_shape=True)
    def Scale(x: Any, factor: float = 2.0) -> Any:
        return x * tf.get_variable("factor", [], initializer=tf.constant_initializer(factor))

    with argscope(Scale, factor=3.0):
        value = tf.Session().run(Scale("scale", tf.ones([2])))

    assert value.tolist() == [3, 3]
    assert tf.global_variables()[0].name == "scale/factor:0"


def test_costs_are_regularized() -> None:
    ones = tf.ones_initializer()
    with TowerContext("", is_training=True):
        FullyConnected("a", tf.ones([2, 4]), 3, kernel_initializer=ones)
        regularizer = l2_regularizer(1.0)
        FullyConnected(
            "b", tf.ones([2, 4]), 3, kernel_initializer=ones, kernel_regularizer=regularizer
        )
        costs = [
            regularize_cost("[ab]/W", tf.nn.l2_loss),
            regularize_cost("a/W", l2_regularizer(0.5)),
            regularize_cost_from_collection(),
        ]

    assert tf.Session().run(costs) == [12, 3, 6]


def test_scopes_reuse_names() -> None:
    @auto_reuse_variable_scope
    def build(features: Any) -> Any:
        return FullyConnected("fc", features, 3)

    @under_name_scope(name_scope="loss")
    def name_loss(features: Any) -> Any:
        return tf.identity(features, name="sum")

    build(tf.ones([2, 4]))
    build(tf.zeros([2, 4]))
    loss = name_loss(tf.ones([]))
    with cached_name_scope("cached"):
        first = tf.ones([], name="one")
    with cached_name_scope("cached"):
        second = tf.ones([], name="two")

    assert [variable.name for variable in tf.trainable_variables()] == ["fc/W:0", "fc/b:0"]
    assert [item.name for item in (loss, first, second)] == [
        "loss/sum:0",
        "cached/one:0",
        "cached/two:0",
    ]


def test_variables_are_frozen_and_replaced() -> None:
    def double(variable: Any) -> Any:
        return variable * 2 if variable.op.name.endswith("W") else variable

    def get_untrained(getter: Any, *arguments: Any, **options: Any) -> Any:
        return getter(*arguments, **{**options, "trainable": False})

    ones = tf.ones_initializer()
    with freeze_variables(stop_gradient=True, skip_collection=True):
        frozen = FullyConnected("frozen", tf.ones([1, 2]), 2, kernel_initializer=ones)
    with remap_variables(double):
        output = FullyConnected("remapped", frozen, 2, kernel_initializer=ones)
    with custom_getter_scope(get_untrained):
        FullyConnected("untrained", output, 2)

    names = [variable.name for variable in tf.trainable_variables()]
    assert names == ["remapped/W:0", "remapped/b:0"]
    weight = next(item for item in tf.global_variables() if item.name == "frozen/W:0")
    assert tf.gradients(output, [weight]) == [None]
    assert tf.Session().run(output).tolist() == [[8, 8]]


def test_gradients_are_processed() -> None:
    weight = tf.get_variable("weight", initializer=[3.0, 4.0])
    unused = tf.get_variable("unused", initializer=[1.0])
    gradients = [(tf.constant([30.0, 40.0]), weight), (None, unused)]
    processors = [
        gradproc.FilterNoneGrad(),
        gradproc.GlobalNormClip(5.0),
        gradproc.SummaryGradient(),
        gradproc.CheckGradient(),
        gradproc.PrintGradient(),
        gradproc.ScaleGradient([("weight", 2.0)]),
        gradproc.MapGradient(lambda gradient: gradient * 10, regex="weight"),
    ]

    with TowerContext("", is_training=True):
        for processor in processors:
            gradients = processor.process(gradients)

    assert len(gradients) == 1
    np.testing.assert_allclose(tf.Session().run(gradients[0][0]), [60, 80], rtol=1e-6)


def descend(wrap: Callable[[Any], Any], steps: int) -> list[float]:
    """Returns the values of a weight in steps of gradient descent on its square, from 1."""
    weight = tf.get_variable("weight", initializer=1.0)
    with TowerContext("", is_training=True):
        wrapped = wrap(tf.train.GradientDescentOptimizer(0.25))
        train_op = wrapped.minimize(weight * weight, name="train_op")
    session = tf.Session()
    values = []
    for _ in range(steps):
        session.run(train_op)
        values.append(float(session.run(weight)))
    return values


def test_gradients_are_summed_over_steps() -> None:
    values = descend(lambda inner: optimizer.AccumGradOptimizer(inner, 3), 6)

    # The gradient of the square is two weights, and the sum of three steps is applied.
    assert values == [1, 1, -0.5, -0.5, -0.5, 0.25]


def test_variables_are_processed_after_the_step() -> None:
    values = descend(
        lambda inner: optimizer.VariableAssignmentOptimizer(inner, lambda item: item + 1.0), 2
    )
    assert values == [1.5, 1.75]


def test_processors_wrap_an_optimizer() -> None:
    processors = [gradproc.MapGradient(lambda gradient: gradient * 2)]

    values = descend(lambda inner: optimizer.apply_grad_processors(inner, processors), 1)

    assert values == [0]
