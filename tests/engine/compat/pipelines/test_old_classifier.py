"""The classifier of an old model: what it may be given as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.compat.pipelines.bct import (
    count_classes,
    get_single_output,
    load_frozen_classifier,
)
from trainer_kit.errors import UsageError

X = np.random.RandomState(0).randn(5, 3).astype("float32")


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same classifier in several forms."""
    folder = tmp_path_factory.mktemp("classifiers")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])
    older = tf_keras.Sequential(
        [tf_keras.Input((3,)), tf_keras.layers.Dense(2, activation="softmax")]
    )
    older.set_weights(model.get_weights())
    model.save(folder / "old.keras")
    model.export(str(folder / "new"), verbose=False)
    older.save(str(folder / "older"), save_format="tf")
    paths = {
        "a .keras file": "old.keras",
        "a SavedModel": "new",
        "a SavedModel of tf_keras": "older",
    }
    return {"a model": model, **{name: folder / path for name, path in paths.items()}}


@pytest.mark.parametrize(
    "form", ["a model", "a .keras file", "a SavedModel", "a SavedModel of tf_keras"]
)
def test_gradients_go_through_a_frozen_classifier(form: str, classifiers: dict[str, Any]) -> None:
    model = classifiers["a model"]
    layer = load_frozen_classifier(classifiers[form])

    gradients = []
    for classifier in (model, layer):
        with tf.GradientTape() as tape:
            embeddings = tf.Variable(X)
            outputs = get_single_output(classifier(tf.identity(embeddings), training=False))
            loss = tf.reduce_sum(outputs[:, 0])
        gradients.append(tape.gradient(loss, embeddings))

    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-5)
    assert count_classes(layer, 3, False) == 2
    assert len(layer.variables) == 2
    assert layer.trainable_variables == []


def test_a_whole_model_is_no_classifier_of_embeddings() -> None:
    whole = keras.Sequential([keras.Input((7,)), keras.layers.Dense(2, activation="softmax")])
    message = r"does not take the new embeddings, \[batch, 3\].*NAME_OF_THE_EMBEDDING"
    with pytest.raises(UsageError, match=message):
        count_classes(load_frozen_classifier(whole), 3, False)


@pytest.mark.parametrize(
    ("classifier", "message"),
    [
        ("nowhere.keras", "nowhere.keras cannot be"),
        ("nowhere", "nowhere cannot be loaded"),
        (3, "int is no model"),
    ],
)
def test_an_object_that_is_no_classifier_is_an_error(classifier: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_frozen_classifier(classifier)


def test_logits_are_told_from_probabilities() -> None:
    logits = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert count_classes(logits, 3, True) == 2

    message = "old_from_logits=False: the old classifier returns logits"
    with pytest.raises(UsageError, match=message):
        count_classes(logits, 3, False)


@pytest.mark.parametrize("name", ["old.keras", "old.h5"])
def test_code_in_the_file_of_a_classifier_is_refused(name: str, tmp_path: Path) -> None:
    layers = [keras.layers.Lambda(lambda inputs: inputs * 2), keras.layers.Dense(2)]
    keras.Sequential([keras.Input((3,)), *layers]).save(tmp_path / name)

    with pytest.raises(UsageError, match=r"cannot be loaded.*`Lambda` layer"):
        load_frozen_classifier(tmp_path / name)
