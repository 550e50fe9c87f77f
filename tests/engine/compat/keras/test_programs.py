"""Programs of Keras's guides: fit gives the history of Model.fit to 1e-6."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

from tests.builders import replicas
from tests.engine.compat.keras.keras_programs import (
    CROSSENTROPY,
    WEIGHTS,
    Batches,
    Changing,
    OldBatches,
    X,
    Y,
    added_loss,
    assert_same_history,
    assert_same_weights,
    classifier,
    custom_step,
    deep_classifier,
    endless_batches,
    gan,
    linear,
    model_with_tensor_conditions,
    model_with_two_optimizers,
    pairs,
    tf_keras_linear,
    two_outputs,
)
from trainer_kit.compat import keras as tk_keras


def assert_same_fit(model: Any, history: Any, theirs: Any, expected: Any) -> None:
    """Checks that two fits have the same histories and weights."""
    assert_same_history(history, expected)
    for weight, other in zip(model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


# What is most of a program's time is traced: those whose subject is the data have a model of one
# layer.
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "a deep model with XLA": (
        lambda: deep_classifier(jit_compile="auto"),  # as Keras compiles by default
        lambda: {"x": X, "y": Y, "validation_split": 0.2},
    ),
    "two inputs and outputs": (two_outputs, lambda: {"x": [X, -X], "y": {"p": Y, "q": WEIGHTS}}),
    "steps of its own, a dataset of unknown length": (
        custom_step,
        lambda: {
            "x": pairs().filter(lambda x, y: y >= 0).shuffle(100).batch(32),
            "validation_data": (X, Y),
        },
    ),
    "two models and optimizers": (gan, lambda: {"x": X}),
    "a dataset without end, weights of classes": (
        classifier,
        lambda: {
            "x": pairs().batch(20).repeat(),
            "steps_per_epoch": 3,
            "class_weight": {0: 1.0, 1: 2.5, 2: 0.5},
            "validation_data": pairs().batch(20).repeat(),
            "validation_steps": 2,
        },
    ),
    "a PyDataset": (classifier, lambda: {"x": Batches(workers=2), "shuffle": False}),
    "a Sequence of tf_keras": (
        tf_keras_linear,
        lambda: {"x": OldBatches(), "shuffle": False, "validation_data": OldBatches()},
    ),
    "conditions of tensors in a model of tf_keras": (
        model_with_tensor_conditions,
        lambda: {"x": X, "y": Y, "validation_data": (X, Y)},
    ),
    "a generator, averaged weights": (
        lambda: classifier(optimizer=keras.optimizers.SGD(use_ema=True)),
        lambda: {"x": endless_batches(), "steps_per_epoch": 5},
    ),
    "weights, validation in some epochs": (
        lambda: classifier(metrics=["accuracy"], weighted_metrics=["accuracy"]),
        lambda: {
            "x": X,
            "y": Y,
            "sample_weight": WEIGHTS,
            "batch_size": 7,
            "epochs": 3,
            "validation_data": (X, Y, 1 - WEIGHTS),
            "validation_freq": [1, 3],
        },
    ),
}


def build_with_seed(build: Callable[[], Any]) -> Any:
    """Returns a new model whose weights, masks and orders come from one seed."""
    keras.utils.set_random_seed(3)
    tf_keras.utils.set_random_seed(3)
    return build()


@pytest.mark.parametrize("program", PROGRAMS)
def test_fit_gives_the_numbers_of_keras(program: str, tmp_path: Path) -> None:
    build, data = PROGRAMS[program]
    theirs = build_with_seed(build)
    expected = theirs.fit(**{"epochs": 2, "verbose": 0, **data()})

    ours = build_with_seed(build)
    history = tk_keras.fit(
        ours, **{"epochs": 2, "verbose": 0, "model_dir": str(tmp_path), **data()}
    )

    assert_same_fit(ours, history, theirs, expected)


def test_an_added_loss_counts_in_single_and_fused_steps(tmp_path: Path) -> None:
    options = {"epochs": 2, "validation_data": (X, Y), "validation_freq": 2, "verbose": 0}
    theirs = build_with_seed(added_loss)
    expected = theirs.fit(X, Y, **options)

    for fuse_steps in (1, 3):
        ours = build_with_seed(added_loss)
        history = tk_keras.fit(
            ours, X, Y, **options, model_dir=str(tmp_path / str(fuse_steps)), fuse_steps=fuse_steps
        )
        assert_same_fit(ours, history, theirs, expected)


class Level(keras.callbacks.Callback):
    """Makes the features of a PyDataset larger in each epoch."""

    def __init__(self, batches: Any) -> None:
        super().__init__()
        self.batches = batches

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.batches.level = epoch


def test_a_resumed_fit_reads_a_py_dataset_as_keras(tmp_path: Path) -> None:
    def arguments() -> dict[str, Any]:
        batches = Changing()
        return {"x": batches, "callbacks": [Level(batches)], "shuffle": False, "verbose": 0}

    theirs = build_with_seed(classifier)
    expected = theirs.fit(**arguments(), epochs=3)

    tk_keras.fit(build_with_seed(classifier), **arguments(), epochs=1, model_dir=str(tmp_path))
    resumed = build_with_seed(classifier)
    history = tk_keras.fit(resumed, **arguments(), epochs=3, model_dir=str(tmp_path))

    assert_same_fit(resumed, history, theirs, expected)


def test_two_replicas_give_the_numbers_of_keras(tmp_path: Path) -> None:
    def build_normalized() -> Any:
        return classifier(
            keras.layers.Dropout(0.3), keras.layers.BatchNormalization(), metrics=["accuracy"]
        )

    with replicas(2).scope():
        theirs = build_with_seed(build_normalized)
    expected = theirs.fit(pairs().shuffle(100).batch(32), epochs=2, verbose=0)

    with replicas(2).scope():
        ours = build_with_seed(build_normalized)
    history = tk_keras.fit(
        ours,
        pairs().shuffle(100).batch(32),
        epochs=2,
        validation_data=(X, Y),
        verbose=0,
        model_dir=str(tmp_path),
    )
    evaluated = {name: history.history.pop(f"val_{name}")[-1] for name in ("loss", "accuracy")}
    assert_same_fit(ours, history, theirs, expected)

    # Keras evaluates each replica with its own moving averages, and saves those of the first one.
    saved = build_normalized()
    saved.set_weights(ours.get_weights())
    assert saved.evaluate(X, Y, verbose=0, return_dict=True) == pytest.approx(evaluated, rel=1e-5)


def test_two_replicas_give_the_numbers_of_tf_keras(tmp_path: Path) -> None:
    # Without validation data: tf_keras evaluates each replica with its own moving averages.
    data = {"x": pairs().batch(32), "epochs": 2, "verbose": 0}
    with replicas(2).scope():
        theirs = build_with_seed(model_with_tensor_conditions)
    expected = theirs.fit(**data)

    with replicas(2).scope():
        ours = build_with_seed(model_with_tensor_conditions)
    assert_same_fit(ours, tk_keras.fit(ours, **data, model_dir=str(tmp_path)), theirs, expected)


def test_two_optimizers_of_tf_keras_go_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = build_with_seed(model_with_two_optimizers)
    expected = tk_keras.fit(whole, X, epochs=3, verbose=0, model_dir=str(tmp_path / "whole"))

    for epochs in (1, 3, 3):  # the last fit continues a finished run
        model = build_with_seed(model_with_two_optimizers)
        history = tk_keras.fit(
            model, X, epochs=epochs, verbose=0, model_dir=str(tmp_path / "again")
        )
    assert history.history == expected.history
    assert int(model.first_optimizer.iterations) == 3 * 4
    assert int(model.second_optimizer.iterations) == 3 * 4
    assert_same_weights(model, whole)


def test_two_replicas_build_a_model_from_a_py_dataset(tmp_path: Path) -> None:
    def build_without_input() -> Any:
        with replicas(2).scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.layers.Dropout(0.3), keras.layers.Dense(3)])
            model.compile(keras.optimizers.Adam(use_ema=True), CROSSENTROPY, jit_compile=False)
        return model

    theirs = build_without_input()
    expected = theirs.fit(Batches(), epochs=2, shuffle=False, verbose=0)

    ours = build_without_input()
    history = tk_keras.fit(
        ours, Batches(), epochs=2, shuffle=False, verbose=0, model_dir=str(tmp_path)
    )
    assert_same_fit(ours, history, theirs, expected)


def test_two_replicas_clip_like_one(tmp_path: Path) -> None:
    theirs = linear(optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.05))
    expected = theirs.fit(X, Y, epochs=2, verbose=0)

    with replicas(2).scope():
        ours = linear(optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.05))
    history = tk_keras.fit(ours, X, Y, epochs=2, verbose=0, model_dir=str(tmp_path))

    assert_same_fit(ours, history, theirs, expected)


def test_a_gan_trains_on_two_replicas_and_is_loaded(tmp_path: Path) -> None:
    with replicas(2).scope():
        model = build_with_seed(gan)
    history = tk_keras.fit(model, X, epochs=1, verbose=0, model_dir=str(tmp_path))

    assert list(history.history) == ["d_loss", "g_loss"]
    assert model.g_optimizer.iterations == 4

    loaded = tk_keras.load(gan(), str(tmp_path))  # it has no call
    np.testing.assert_array_equal(
        loaded.generator.get_weights()[0], model.generator.get_weights()[0]
    )
