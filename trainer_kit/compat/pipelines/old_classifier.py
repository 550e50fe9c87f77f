"""The classifier of an old model: where it is loaded from, and whether it fits the new embeddings."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError

_ENDPOINTS = ("serve", "serving_default")  # of Keras 3, and of older programs
_HEAD = "keras.Model(old.get_layer(NAME_OF_THE_EMBEDDING).output, old.outputs[0])"


def frozen_classifier(given: Any) -> keras.Layer:
    """Returns an old classifier as a layer that is not trained. Runs eagerly, in the scope of the strategy.

    Args:
      given: A model or layer of Keras 3, or the path of a `.keras` file or a SavedModel.

    Raises:
      UsageError: when it is none of these.
    """
    layer = _loaded(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(layer, keras.Layer):
        raise UsageError(
            f"old_classifier: {type(given).__name__} is no model or layer of Keras 3; give one, or the path of a "
            "SavedModel or a .keras file"
        )
    layer.trainable = False
    return layer


def only_output(outputs: Any) -> Any:
    """Returns the output of a classifier. A signature of a SavedModel has its output in a dict."""
    flat = tf.nest.flatten(outputs)
    if len(flat) == 1:
        return flat[0]
    raise UsageError(f"old_classifier: it has {len(flat)} outputs; give the part with the classes alone: {_HEAD}")


def count_classes(classifier: keras.Layer, size: int, from_logits: bool) -> int:
    """Returns the number of classes of an old classifier, which is tried on random embeddings.

    Runs eagerly, on the host.

    Args:
      classifier: The old classifier.
      size: The number of values in an embedding.
      from_logits: Whether the classifier returns logits.

    Raises:
      UsageError: when it does not take embeddings of this size, or returns the other kind of numbers.
    """
    embeddings = np.random.RandomState(0).normal(size=(4, size)).astype(np.float32)
    try:
        outputs = only_output(classifier(embeddings, training=False))
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:  # a TFSMLayer raises a TypeError
        raise UsageError(
            f"old_classifier: it does not take the new embeddings, [batch, {size}]; old and new embeddings have the "
            f"same size, and the classifier is the part of the old model behind them: {_HEAD}. {error!s:.300}"
        ) from error
    values = np.asarray(outputs, np.float64)
    if values.ndim != 2 or values.shape[1] < 2:
        raise UsageError(f"old_classifier: it returned {values.shape}; it has to return [batch, classes]")
    are_probabilities = bool((values >= 0).all() and np.allclose(values.sum(axis=1), 1, atol=1e-2))
    if are_probabilities == from_logits:
        kind = "probabilities" if are_probabilities else "logits, which do not sum to 1"
        raise UsageError(
            f"old_from_logits={from_logits}: the old classifier returns {kind}; set it to {not from_logits}"
        )
    return int(values.shape[1])


def _loaded(path: str) -> Any:
    if path.endswith((".keras", ".h5")):
        if not tf.io.gfile.exists(path):
            raise UsageError(f"old_classifier: there is no file {path}")
        return keras.saving.load_model(path, compile=False)
    if not tf.saved_model.contains_saved_model(path):
        raise UsageError(f"old_classifier: {path} is no SavedModel; give the path of a SavedModel or a .keras file")
    found = tf.saved_model.load(path)
    endpoint = next((name for name in _ENDPOINTS if hasattr(found, name) or name in found.signatures), None)
    if endpoint is None:
        raise UsageError(
            f"old_classifier: {path} has none of the functions {', '.join(_ENDPOINTS)}; export the classifier with "
            "model.export"
        )
    return keras.layers.TFSMLayer(path, call_endpoint=endpoint, trainable=False)
