"""RetrievalAccuracy: the share of queries that find an example of their class in a gallery of embeddings."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError


class RetrievalAccuracy(keras.metrics.Mean):
    """The share of queries whose most similar embedding in a gallery has their label; similarity is the cosine.

    If an old model has embedded the gallery and a new model embeds the queries, this is the cross-test of
    backward-compatible training (arXiv 2003.11942). A query must not be in the gallery.

    Args:
      gallery: The embeddings that are searched, float [examples, size].
      labels: Their labels: int [examples], or rows with one value for each class, [examples, classes].
      name: The name of the metric.

    Raises:
      UsageError: when the gallery is empty, or has another number of labels.
    """

    def __init__(self, gallery: Any, labels: Any, name: str = "cross_retrieval") -> None:
        super().__init__(name=name)
        points, classes = np.asarray(gallery, np.float32), np.asarray(labels)
        if points.ndim != 2 or not len(points) or len(points) != len(classes):
            raise UsageError(
                f"gallery: embeddings of shape {points.shape} and labels of shape {classes.shape} are no gallery; give "
                "embeddings [examples, size] and one label for each example"
            )
        self._gallery = tf.math.l2_normalize(tf.constant(points), axis=1)
        self._labels = _class_numbers(tf.constant(classes))

    def update_state(self, y_true: Any, embeddings: Any, sample_weight: Any = None) -> None:
        """Adds queries; in graph or eagerly, on a replica.

        Args:
          y_true: The labels of the queries, in either form.
          embeddings: Their embeddings, float [batch, size].
          sample_weight: The weight of each query, [batch]; None: all count alike.
        """
        queries = tf.math.l2_normalize(tf.cast(embeddings, tf.float32), axis=1)
        nearest = tf.argmax(tf.matmul(queries, self._gallery, transpose_b=True), axis=1)
        found = tf.equal(tf.gather(self._labels, nearest), _class_numbers(tf.convert_to_tensor(y_true)))
        super().update_state(tf.cast(found, tf.float32), sample_weight)


def _class_numbers(labels: tf.Tensor) -> tf.Tensor:
    """Returns labels as int64 [examples]."""
    if labels.shape.rank == 2 and labels.shape[1] != 1:
        return tf.argmax(labels, axis=1)
    return tf.cast(tf.reshape(labels, [-1]), tf.int64)
