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
    X,
    Y,
    added_loss,
    assert_same_history,
    assert_same_weights,
    classifier,
    custom_step,
    endless_batches,
    gan,
    linear,
    pairs,
    two_outputs,
)
from tests.engine.compat.keras.tf_keras_programs import (
    OldBatches,
    model_with_tensor_conditions,
    model_with_two_optimizers,
)
from trainer_kit.compat import keras as tk_keras


def assert_same_fit(model: Any, history: Any, theirs: Any, expected: Any) -> None:
    """Checks that two fits have the same histories and weights."""
    assert_same_history(history, expected)
    for weight, other in zip(model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


def unbuilt_classifier(*hidden: Any, **options: Any) -> Any:
    """Returns a model of one layer behind dropout and `hidden`, which its first batch builds."""
    model = keras.Sequential([keras.layers.Dropout(0.3), *hidden, keras.layers.Dense(3)])
    model.compile("sgd", CROSSENTROPY, jit_compile=False, **options)
    return model


# What is most of a program's time is traced: those whose subject is the data have a model of one
# layer.
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "XLA, a part of the arrays for validation": (
        lambda: classifier(jit_compile="auto"),  # as Keras compiles by default
        lambda: {"x": X, "y": Y, "validation_split": 0.2},
    ),
    "two inputs and outputs, weights, validation in some epochs": (
        two_outputs,
        lambda: {
            "x": [X, -X],
            "y": {"p": Y, "q": WEIGHTS},
            "sample_weight": {"p": WEIGHTS, "q": 1 - WEIGHTS},
            "batch_size": 7,
            "epochs": 3,
            "validation_data": ([-X, X], {"p": Y, "q": WEIGHTS}, {"p": 1 - WEIGHTS, "q": WEIGHTS}),
            "validation_freq": [1, 3],
        },
    ),
    "steps of its own, a dataset of unknown length": (
        custom_step,
        lambda: {
            "x": pairs().filter(lambda x, y: y >= 0).shuffle(100).batch(32),
            "validation_data": (X, Y),
        },
    ),
    "two models and optimizers": (gan, lambda: {"x": X}),
    "a dataset without end, weights of classes, averaged weights": (
        lambda: classifier(optimizer=keras.optimizers.SGD(use_ema=True)),
        lambda: {
            "x": pairs().batch(20).repeat(),
            "steps_per_epoch": 3,
            "class_weight": {0: 1.0, 1: 2.5, 2: 0.5},
            "validation_data": pairs().batch(20).repeat(),
            "validation_steps": 2,
        },
    ),
    "a PyDataset, a model that is not built": (
        unbuilt_classifier,
        lambda: {"x": Batches(workers=2), "shuffle": False},
    ),
    "a generator without end": (
        classifier,
        lambda: {"x": endless_batches(), "steps_per_epoch": 5},
    ),
    "a Sequence of tf_keras, conditions of tensors in the model": (
        model_with_tensor_conditions,
        lambda: {"x": OldBatches(), "shuffle": False, "validation_data": OldBatches()},
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


def test_a_gan_trains_on_two_replicas_and_is_loaded(tmp_path: Path) -> None:
    with replicas(2).scope():
        model = build_with_seed(gan)
    history = tk_keras.fit(model, X, epochs=1, verbose=0, model_dir=str(tmp_path))

    assert list(history.history) == ["d_loss", "g_loss"]
    assert model.g_optimizer.iterations == 4
    assert_same_weights(tk_keras.load(gan(), str(tmp_path)), model)  # it has no call


def test_an_added_loss_counts_in_single_and_fused_steps(tmp_path: Path) -> None:
    options = {"epochs": 2, "validation_data": (X, Y), "validation_freq": 2, "verbose": 0}
    theirs = build_with_seed(added_loss)
    expected = theirs.fit(X, Y, **options)

    # An epoch has three fused steps and a single one.
    ours = build_with_seed(added_loss)
    history = tk_keras.fit(ours, X, Y, **options, model_dir=str(tmp_path), fuse_steps=3)

    assert_same_fit(ours, history, theirs, expected)


class EvaluationBatches(keras.callbacks.Callback):
    """Notes each method of evaluations that is called, with the number of the batch and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, Any]] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", 0, logs or {}))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch_begin", batch, logs or {}))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch_end", batch, logs))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("end", 0, logs))


def test_two_replicas_give_the_numbers_of_keras(tmp_path: Path) -> None:
    def build_normalized() -> Any:
        return unbuilt_classifier(keras.layers.BatchNormalization(), metrics=["accuracy"])

    options = {"x": pairs().shuffle(100).batch(32), "epochs": 2, "verbose": 0}
    with replicas(2).scope():
        theirs = build_with_seed(build_normalized)
    expected = theirs.fit(**options)

    evaluated = EvaluationBatches()
    with replicas(2).scope():
        ours = build_with_seed(build_normalized)
    history = tk_keras.fit(
        ours,
        **{**options, "x": pairs().shuffle(100).batch(32)},
        callbacks=[evaluated],
        validation_data=(X, Y),
        validation_freq=2,
        model_dir=str(tmp_path),
    )
    last_evaluation = [history.history.pop(f"val_{name}")[-1] for name in ("accuracy", "loss")]
    assert_same_fit(ours, history, theirs, expected)

    # Keras evaluates each replica with its own moving averages, and saves those of the first one.
    saved = build_normalized()
    saved.build((None, 8))
    saved.set_weights(ours.get_weights())
    evaluated_alone = EvaluationBatches()
    saved.evaluate(X, Y, verbose=0, callbacks=[evaluated_alone])

    assert last_evaluation == [evaluated.calls[-1][2][name] for name in ("accuracy", "loss")]
    assert len(evaluated.calls) == len(evaluated_alone.calls) == 2 + 2 * 4
    for call, expected_call in zip(evaluated.calls, evaluated_alone.calls, strict=True):
        assert call[:2] == expected_call[:2]
        assert call[2] == pytest.approx(expected_call[2], rel=1e-5)


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

    for epochs in (1, 3):
        model = build_with_seed(model_with_two_optimizers)
        history = tk_keras.fit(
            model, X, epochs=epochs, verbose=0, model_dir=str(tmp_path / "again")
        )
    assert history.history == expected.history
    assert int(model.first_optimizer.iterations) == 3 * 4
    assert int(model.second_optimizer.iterations) == 3 * 4
    assert_same_weights(model, whole)


def test_two_replicas_clip_and_average_like_one(tmp_path: Path) -> None:
    def build() -> Any:
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.05, use_ema=True, ema_momentum=0.9)
        return linear(optimizer=optimizer)

    theirs = build()
    expected = theirs.fit(X, Y, epochs=2, verbose=0)

    with replicas(2).scope():
        ours = build()
    history = tk_keras.fit(ours, X, Y, epochs=2, verbose=0, model_dir=str(tmp_path))

    assert_same_fit(ours, history, theirs, expected)
