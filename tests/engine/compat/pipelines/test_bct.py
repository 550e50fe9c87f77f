"""BCTModel: the influence loss, masked classes, the frozen old classifier, and a fit that is
interrupted.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import replicas
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.pipelines import BCTModel
from trainer_kit.errors import UsageError

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(48, 4).astype("float32")
Y = RANDOM.randint(0, 5, 48)
GALLERY = (RANDOM.randn(10, 3), RANDOM.randint(0, 5, 10))


def old_classifier(activation: str | None = "softmax") -> Any:
    """Returns a classifier of embeddings with two classes."""
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2, activation=activation, name="old_head")]
    )


def bct_model(old: Any = None, **options: Any) -> Any:
    """Returns a compiled model with five classes."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    embedding = keras.layers.Dense(3, name="embedding")(inputs)
    predictions = keras.layers.Dense(5, activation="softmax", name="head")(embedding)
    old = old_classifier() if old is None else old
    model = BCTModel(inputs=inputs, outputs=[predictions, embedding], old_classifier=old, **options)
    options = {"metrics": ["accuracy"], "jit_compile": False}  # docs/guides/bct.md trains with XLA
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    return model


def loss_parts(model: Any, y: Any, sample_weight: Any = None) -> tuple[float, float, float]:
    """Returns the loss, the classification loss and the influence loss of the first three examples,
    by hand.
    """
    predictions, embedding = model(X[:3])
    loss = model.compute_loss(
        x=X[:3], y=y, y_pred=[predictions, embedding], sample_weight=sample_weight
    )

    classification_loss = -np.log(predictions.numpy()[np.arange(3), [4, 1, 0]]).mean()
    # The first example has no old class.
    old = model.old_classifier(embedding).numpy()
    influence_loss = -(math.log(old[1, 1]) + math.log(old[2, 0])) / 3
    return float(loss), classification_loss, influence_loss


LABELS = {
    "numbers": (np.array([4, 1, 0]), None),
    "a column": (np.array([[4], [1], [0]]), None),
    "old numbers": ((np.array([4, 1, 0]), np.array([-1, 1, 0])), None),
    "old rows": ((np.array([4, 1, 0]), np.float32([[0, 0], [0, 1], [1, 0]])), None),
    "old rows as the third part": (np.array([4, 1, 0]), np.float32([[0, 0], [0, 1], [1, 0]])),
}


@pytest.mark.parametrize("form", LABELS)
def test_the_influence_loss_equals_its_value_by_hand(form: str) -> None:
    y = tf.nest.map_structure(tf.constant, LABELS[form][0])
    third = LABELS[form][1]
    if third is not None:
        third = tf.constant(third)
    model = bct_model(influence_weight=2.0)

    loss, classification_loss, influence_loss = loss_parts(model, y, third)

    assert loss == pytest.approx(classification_loss + 2 * influence_loss, rel=1e-5)
    assert float(model.influence_tracker.result()) == pytest.approx(influence_loss, rel=1e-5)


def test_one_hot_labels_are_those_of_the_new_classes() -> None:
    model = bct_model(old_classes=[1, 0])
    model.compile("adam", "categorical_crossentropy")
    predictions, embedding = model(X[:1])
    model.compute_loss(y=tf.one_hot([0], 5), y_pred=[predictions, embedding])
    expected = -math.log(model.old_classifier(embedding)[0, 1])

    assert float(model.influence_tracker.result()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("activation", ["softmax", None])
def test_an_example_without_an_old_class_has_no_gradient(activation: str | None) -> None:
    old = old_classifier(activation)
    old.set_weights([np.float32([[1, -1], [0, 0], [0, 0]]), np.zeros(2, np.float32)])
    model = bct_model(old, old_from_logits=activation is None)
    # The old classifier is sure: exp(40) to 1.
    embedding = tf.Variable([[20.0, 0, 0], [20.0, 0, 0]])

    with tf.GradientTape() as tape:
        outputs = model.old_classifier(embedding)
        loss = tf.reduce_sum(model.influence_loss(tf.constant([[0.0, 0], [0, 1]]), outputs))
    assert float(loss) == pytest.approx(40)
    np.testing.assert_allclose(tape.gradient(loss, embedding), [[0, 0, 0], [2, 0, 0]], atol=1e-5)


def test_weights_of_examples_count_in_both_losses() -> None:
    model = bct_model()
    loss, _, _ = loss_parts(model, tf.constant([4, 1, 0]), sample_weight=tf.zeros(3))
    assert loss == 0


def fit_model(folder: Path, epochs: int, model: Any, **options: Any) -> Any:
    """Returns the history of a fit with an evaluation after each epoch."""
    data = {"epochs": epochs, "batch_size": 16, "validation_data": (X, Y)}
    return tk_keras.fit(model, X, Y, **data, model_dir=str(folder), verbose=0, **options).history


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A fit of two epochs: its old classifier and the weights of that before, its model and its
    history.
    """
    old = old_classifier()
    before = [weight.copy() for weight in old.get_weights()]
    model = bct_model(old, gallery=GALLERY)
    history = fit_model(tmp_path_factory.mktemp("whole"), 2, model)
    return {"old": old, "before": before, "model": model, "history": history}


def test_a_fit_has_the_numbers_of_keras(whole: dict[str, Any]) -> None:
    model = bct_model(whole["old"], gallery=GALLERY)
    plain = model.fit(X, Y, batch_size=16, epochs=2, validation_data=(X, Y), verbose=0).history

    assert whole["history"].keys() == plain.keys()
    assert {"influence_loss", "old_accuracy", "val_cross_retrieval"} <= plain.keys()
    for name, values in plain.items():
        np.testing.assert_allclose(whole["history"][name], values, rtol=1e-5, err_msg=name)
    for variable, expected in zip(whole["model"].variables, model.variables, strict=True):
        np.testing.assert_allclose(variable, expected, rtol=1e-5, atol=1e-6, err_msg=variable.path)


def test_a_resumed_fit_has_the_same_bits(whole: dict[str, Any], tmp_path: Path) -> None:
    fit_model(tmp_path, 1, bct_model(whole["old"], gallery=GALLERY))
    # Its old classifier has new values: those of the run are in its checkpoint.
    model = bct_model(gallery=GALLERY)
    history = fit_model(tmp_path, 2, model)

    assert history == whole["history"]
    for variable, expected in zip(model.variables, whole["model"].variables, strict=True):
        assert variable.numpy().tobytes() == expected.numpy().tobytes()
    np.testing.assert_equal(model.old_classifier.get_weights(), whole["before"])


def test_the_old_classifier_is_in_no_optimizer(whole: dict[str, Any]) -> None:
    model = whole["model"]
    paths = [variable.path for variable in model.trainable_variables]

    assert paths == ["embedding/kernel", "embedding/bias", "head/kernel", "head/bias"]
    assert len(model.optimizer.variables) == 2 + 4
    np.testing.assert_equal(whole["old"].get_weights(), whole["before"])


def test_the_losses_of_two_replicas_add_up_to_that_of_one() -> None:
    strategy = replicas(2)
    with strategy.scope():
        model = bct_model()

    def compute_loss(x: Any, y: Any) -> Any:
        return model.compute_loss(x=x, y=y, y_pred=model(x))

    halves = [
        strategy.experimental_distribute_values_from_function(
            lambda context, array=array: tf.constant(array[context.replica_id_in_sync_group :: 2])
        )
        for array in (X, Y)
    ]
    losses = tf.function(lambda: strategy.run(compute_loss, halves))()
    loss = strategy.reduce("SUM", losses, axis=None)
    influence_loss = model.influence_tracker.result()

    model.reset_metrics()
    np.testing.assert_allclose(loss, compute_loss(tf.constant(X), tf.constant(Y)), rtol=1e-5)
    np.testing.assert_allclose(influence_loss, model.influence_tracker.result(), rtol=1e-5)


def test_a_keras_file_gives_the_model_back(tmp_path: Path) -> None:
    model = bct_model(old_classes=[3, 4], influence_weight=0.5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(
        tmp_path / "model.keras", custom_objects={"BCTModel": BCTModel}
    )

    loss = model.compute_loss(y=tf.constant(Y), y_pred=model(X))
    assert float(loaded.compute_loss(y=tf.constant(Y), y_pred=loaded(X))) == float(loss)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "classes": ({"old_classes": [1]}, r"\[1\] are not the labels of the 2 classes"),
    "the same class twice": ({"old_classes": [1, 1]}, r"give one label for each of its outputs"),
    "no new class": (
        {"old_classes": [4, 5]},
        r"\[4, 5\] are not the labels .* among the 5 of the new model",
    ),
    "probabilities": ({"old_from_logits": True}, "returns probabilities; set it to False"),
    "gallery": ({"gallery": (np.zeros((3, 3)), [1])}, r"labels of shape \(1,\) are no gallery"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_classifier_that_does_not_fit_is_an_error(mistake: str) -> None:
    options, message = MISTAKES[mistake]
    with pytest.raises(UsageError, match=message):
        bct_model(**options)


def test_a_model_without_embeddings_is_an_error() -> None:
    inputs = keras.Input((4,))
    with pytest.raises(UsageError, match=r"\(None, 5\) were given; call BCTModel"):
        BCTModel(
            inputs=inputs, outputs=keras.layers.Dense(5)(inputs), old_classifier=old_classifier()
        )
