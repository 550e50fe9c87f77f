"""Backward-compatible training: BCTModel, the old classifier, and the metric of the cross-test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer_kit.errors import UsageError

# About the smallest float32 whose logarithm has a gradient.
_LEAST_PROBABILITY = 1e-37

_HEAD = "keras.Model(old.get_layer(NAME_OF_THE_EMBEDDING).output, old.outputs[0])"


class RetrievalAccuracy(keras.metrics.Mean):
    """The share of queries whose most similar embedding in a gallery has their label.

    Similarity is the cosine. If an old model has embedded the gallery and a new model embeds the
    queries, this is the cross-test of backward-compatible training (arXiv 2003.11942). A query must
    not be in the gallery.

    Args:
      gallery: The embeddings that are searched, float [examples, size].
      labels: Their labels: int [examples], or rows with one value for each class, [examples,
        classes].
      name: The name of the metric.

    Raises:
      UsageError: When the gallery is empty, or has another number of labels.
    """

    def __init__(
        self, gallery: npt.ArrayLike, labels: npt.ArrayLike, name: str = "cross_retrieval"
    ) -> None:
        super().__init__(name=name)
        embeddings = np.asarray(gallery, np.float32)
        classes = np.asarray(labels)
        are_embeddings = embeddings.ndim == 2 and len(embeddings) > 0
        if not are_embeddings or len(embeddings) != len(classes):
            raise UsageError(
                f"gallery: embeddings of shape {embeddings.shape} and labels of shape"
                f" {classes.shape} are no gallery; give embeddings [examples, size] and one label"
                " for each example"
            )

        gallery_tensor = tf.constant(embeddings)
        self._gallery = tf.math.l2_normalize(gallery_tensor, axis=1)
        label_tensor = tf.constant(classes)
        self._labels = _class_numbers(label_tensor)

    def update_state(
        self,
        y_true: tf.Tensor,
        embeddings: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
    ) -> None:
        """Adds queries, in graph or eagerly, on a replica.

        Args:
          y_true: The labels of the queries: class numbers, [batch] or [batch, 1], or one-hot rows,
            [batch, classes].
          embeddings: Their embeddings, float [batch, size].
          sample_weight: The weight of each query, [batch]. None: all count alike.
        """
        queries = tf.cast(embeddings, tf.float32)
        queries = tf.math.l2_normalize(queries, axis=1)
        similarities = tf.matmul(queries, self._gallery, transpose_b=True)
        nearest = tf.argmax(similarities, axis=1)
        nearest_labels = tf.gather(self._labels, nearest)
        labels = tf.convert_to_tensor(y_true)
        labels = _class_numbers(labels)
        hits = tf.equal(nearest_labels, labels)
        values = tf.cast(hits, tf.float32)
        super().update_state(values, sample_weight)


def _class_numbers(labels: tf.Tensor) -> tf.Tensor:
    """Returns labels as int64 [examples]."""
    are_rows = labels.shape.rank == 2 and labels.shape[1] != 1
    if are_rows:
        return tf.argmax(labels, axis=1)
    flat_labels = tf.reshape(labels, [-1])
    return tf.cast(flat_labels, tf.int64)


class BCTModel(keras.Model):
    """A functional model of Keras 3 for backward-compatible training.

    Its outputs are [predictions, embedding]: float [batch, classes] and [batch, size].

    The loss is that of `compile`, of the predictions, plus the influence loss times its weight. The
    influence loss is the cross entropy of an old model's classifier at the new embeddings (Shen et
    al. 2020, arXiv 2003.11942). It is the mean over all examples of a batch, and 0 for an example
    whose class the old classifier lacks. The old classifier is frozen: it is in checkpoints, and in
    no optimizer.

    Batches are those of Keras, (x, y) or (x, y, sample_weight), and y is the labels as ints or
    one-hot rows. Labels of the old classifier that do not follow from y are given as
    (x, (y, y_old)) or, as rows, as (x, y, y_old). They are ints, -1 for no class, or rows [batch,
    old classes], of zeros for no class.

    Metrics of `compile` are those of the predictions. Logs also have `influence_loss`,
    `old_accuracy`, which is the accuracy of the old classifier at the new embeddings of classes
    that it has, and `cross_retrieval` with a gallery.

    Args:
      *args, **kwargs: Those of `keras.Model`: inputs, outputs and a name.
      old_classifier: The old model's classifier of embeddings: a model or layer of Keras 3, or the
        path of a SavedModel or a `.keras` file.
      old_classes: The label in y of each class of the old classifier. None: its classes are the
        first ones.
      influence_weight: The weight of the influence loss.
      old_from_logits: Whether the old classifier returns logits. False: it returns probabilities.
      gallery: Embeddings by the old model and their labels, for the cross-test of each batch. See
        RetrievalAccuracy.

    Raises:
      UsageError: When the outputs, the old classifier, its classes or the gallery do not fit.
    """

    def __init__(
        self,
        *args: Any,
        old_classifier: keras.Layer | str | os.PathLike[str],
        old_classes: Sequence[int] | None = None,
        influence_weight: float = 1.0,
        old_from_logits: bool = False,
        gallery: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # A model that is not a functional one has no outputs.
        ends = getattr(self, "outputs", None) or ()
        shapes = [tuple(end.shape) for end in ends]
        embedding_shape = shapes[1] if len(shapes) == 2 else ()
        if len(embedding_shape) != 2 or embedding_shape[1] is None:
            listing = ", ".join(map(str, shapes)) or "none"
            raise UsageError(
                "BCTModel has the outputs [predictions, embedding], [batch, classes] and [batch,"
                f" size]; {listing} were given; call BCTModel(inputs=inputs, outputs=[predictions,"
                " embedding], old_classifier=...)"
            )

        self.old_classifier = load_frozen_classifier(old_classifier)
        size = int(embedding_shape[1])
        count = count_classes(self.old_classifier, size, old_from_logits)
        new_count = shapes[0][-1]
        self.old_classes = _check_classes(old_classes, count, new_count)

        self.influence_weight = influence_weight
        self.old_from_logits = old_from_logits
        self.influence_tracker = keras.metrics.Mean(name="influence_loss")
        self.old_accuracy = keras.metrics.CategoricalAccuracy(name="old_accuracy")
        self.cross_retrieval = None
        if gallery is not None:
            self.cross_retrieval = RetrievalAccuracy(*gallery)

    def compute_loss(
        self,
        x: Any = None,
        y: tf.Tensor | Sequence[tf.Tensor] | None = None,
        y_pred: Any = None,
        sample_weight: tf.Tensor | None = None,
        training: bool = True,
    ) -> tf.Tensor:
        """Returns the loss with the term of the old classifier, and updates its metrics.

        Called on a replica.
        """
        predictions, embedding = y_pred
        y, y_old, sample_weight = self._split_labels(y, sample_weight)
        loss = super().compute_loss(
            x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=training
        )

        raw_outputs = self.old_classifier(embedding, training=False)
        classifier_outputs = get_single_output(raw_outputs)
        outputs = tf.cast(classifier_outputs, tf.float32)
        losses = self.influence_loss(y_old, outputs)
        if sample_weight is not None:
            weights = tf.reshape(sample_weight, [-1])
            losses *= tf.cast(weights, losses.dtype)
        self.influence_tracker.update_state(losses)

        # The sum of a row is 0 for an example whose class the old classifier lacks.
        row_sums = tf.reduce_sum(y_old, axis=1)
        self.old_accuracy.update_state(y_old, outputs, sample_weight=row_sums)

        # Keras adds up the losses of all replicas. The count is 0 on a replica that a small batch
        # leaves empty.
        strategy = tf.distribute.get_strategy()
        replicas = strategy.num_replicas_in_sync
        count = tf.size(losses) * replicas
        count = tf.cast(count, losses.dtype)
        total = tf.reduce_sum(losses)
        mean = tf.math.divide_no_nan(total, count)
        influence = tf.cast(mean, loss.dtype)
        return loss + self.influence_weight * influence

    def influence_loss(self, y_old: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the influence loss of each example, float [batch].

        Override it for a loss with a margin, or for others. Called on a replica.

        Args:
          y_old: The targets of the old classifier, float [batch, old classes]. Zeros for an example
            of another class.
          outputs: What the old classifier returns for the new embeddings, float [batch, old
            classes].
        """
        # Not by the cross entropy of TensorFlow, whose gradient for a row of zeros is
        # softmax(logits) and not 0, nor by that of Keras, whose gradient is 0 where a probability
        # is below 1e-7: at first, new embeddings are far off.
        if self.old_from_logits:
            log_probabilities = tf.nn.log_softmax(outputs)
        else:
            probabilities = tf.maximum(outputs, _LEAST_PROBABILITY)
            log_probabilities = tf.math.log(probabilities)
        products = y_old * log_probabilities
        return -tf.reduce_sum(products, axis=1)

    def compute_metrics(
        self,
        x: Any,
        y: tf.Tensor | Sequence[tf.Tensor],
        y_pred: Sequence[tf.Tensor],
        sample_weight: tf.Tensor | None = None,
    ) -> dict[str, Any]:
        """Updates the metrics of `compile` and the cross-test, and returns all results.

        See keras.Model.
        """
        predictions, embedding = y_pred
        y, _, sample_weight = self._split_labels(y, sample_weight)
        if self.cross_retrieval is not None:
            self.cross_retrieval.update_state(y, embedding)
        return super().compute_metrics(x, y, predictions, sample_weight)

    def get_config(self) -> dict[str, Any]:
        """Returns the config that a `.keras` file contains: all arguments but the gallery."""
        config = super().get_config()
        old_classifier = keras.saving.serialize_keras_object(self.old_classifier)
        return {
            **config,
            "old_classifier": old_classifier,
            "old_classes": list(self.old_classes),
            "influence_weight": self.influence_weight,
            "old_from_logits": self.old_from_logits,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, object] | None = None
    ) -> BCTModel:
        """Returns the model of a config."""
        old_classifier = keras.saving.deserialize_keras_object(
            config["old_classifier"], custom_objects=custom_objects
        )
        arguments = {**config, "old_classifier": old_classifier}
        return super().from_config(arguments, custom_objects=custom_objects)

    def _split_labels(
        self,
        y: tf.Tensor | Sequence[tf.Tensor] | None,
        sample_weight: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Returns y, the targets of the old classifier, and the weights of examples.

        The targets are float32 [batch, old classes].
        """
        count = len(self.old_classes)
        old_numbers = range(count)
        if isinstance(y, (tuple, list)):
            new_labels, old_labels = y
            targets = _build_target_rows(old_labels, old_numbers)
            return new_labels, targets, sample_weight

        # Such rows are no weights of examples: programs of this method give the old labels as the
        # third part.
        if sample_weight is not None and sample_weight.shape.rank == 2:
            if sample_weight.shape[1] == count:
                targets = _build_target_rows(sample_weight, old_numbers)
                return y, targets, None

        targets = _build_target_rows(y, self.old_classes)
        return y, targets, sample_weight


def _build_target_rows(labels: tf.Tensor, classes: Sequence[int]) -> tf.Tensor:
    """Returns a row of targets for each label, float32 [batch, classes].

    A row is zeros where the label is none of `classes`.
    """
    labels = tf.convert_to_tensor(labels)
    columns = list(classes)
    are_rows = labels.shape.rank == 2 and labels.shape[1] != 1
    if are_rows:
        rows = tf.cast(labels, tf.float32)
        return tf.gather(rows, columns, axis=1)

    # [batch, 1] and [classes] are compared as [batch, classes].
    numbers = tf.reshape(labels, [-1, 1])
    numbers = tf.cast(numbers, tf.int64)
    class_numbers = tf.constant(columns, tf.int64)
    matches = tf.equal(numbers, class_numbers)
    return tf.cast(matches, tf.float32)


def _check_classes(
    labels: Sequence[int] | None, count: int, new_count: int | None
) -> tuple[int, ...]:
    """Returns the label of each old class.

    Raises:
      UsageError: When they are not different labels of the new model.
    """
    classes = tuple(range(count))
    if labels is not None:
        classes = tuple(int(label) for label in labels)

    # The number of new classes is None where the shape of the predictions is not known.
    distinct_classes = set(classes)
    are_new_classes = new_count is None or distinct_classes <= set(range(new_count))
    are_distinct = len(distinct_classes) == len(classes)
    if len(classes) != count or not are_distinct or not are_new_classes:
        raise UsageError(
            f"old_classes: {list(classes)} are not the labels of the {count} classes of the old"
            f" classifier among the {new_count} of the new model; give one label for each of its"
            " outputs, in their order"
        )
    return classes


def load_frozen_classifier(classifier: keras.Layer | str | os.PathLike[str]) -> keras.Layer:
    """Returns an old classifier as a layer that is not trained.

    Runs eagerly, in the scope of the strategy.

    Args:
      classifier: A model or layer of Keras 3, or the path of a `.keras` file or a SavedModel.

    Raises:
      UsageError: When it is none of these.
    """
    layer = classifier
    if isinstance(classifier, (str, os.PathLike)):
        path = os.fspath(classifier)
        try:
            if path.endswith((".keras", ".h5")):
                layer = keras.saving.load_model(path, compile=False)
            else:
                # Keras 3 exports an endpoint `serve`, older programs a signature.
                saved_model = tf.saved_model.load(path)
                is_export = hasattr(saved_model, "serve")
                endpoint = "serve" if is_export else "serving_default"
                layer = keras.layers.TFSMLayer(path, call_endpoint=endpoint, trainable=False)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"old_classifier: {path} cannot be loaded; give a .keras file, or a SavedModel by"
                f" model.export: {error}"
            ) from error

    if not isinstance(layer, keras.Layer):
        class_name = type(classifier).__name__
        raise UsageError(
            f"old_classifier: {class_name} is no model or layer of Keras 3; give"
            " one, or the path of a SavedModel or a .keras file"
        )
    layer.trainable = False
    return layer


def get_single_output(outputs: tf.Tensor | Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Returns the output of a classifier. A signature of a SavedModel has its output in a dict."""
    flat = tf.nest.flatten(outputs)
    if len(flat) == 1:
        return flat[0]
    raise UsageError(
        f"old_classifier: it has {len(flat)} outputs; give the part with the classes alone: {_HEAD}"
    )


def count_classes(classifier: keras.Layer, size: int, from_logits: bool) -> int:
    """Returns the number of classes of an old classifier.

    The classifier is called with random embeddings. Runs eagerly, on the host.

    Args:
      classifier: The old classifier.
      size: The number of values in an embedding.
      from_logits: Whether the classifier returns logits.

    Raises:
      UsageError: When it does not take embeddings of this size, or returns the other kind of
        numbers.
    """
    random = np.random.RandomState(0)
    embeddings = random.normal(size=(4, size))
    embeddings = embeddings.astype(np.float32)
    # A TFSMLayer raises a TypeError.
    try:
        raw_outputs = classifier(embeddings, training=False)
        outputs = get_single_output(raw_outputs)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise UsageError(
            f"old_classifier: it does not take the new embeddings, [batch, {size}]; old and new"
            " embeddings have the same size, and the classifier is the part of the old model"
            f" behind them: {_HEAD}. {error!s:.300}"
        ) from error

    values = np.asarray(outputs, np.float64)
    are_probabilities = bool((values >= 0).all())
    if are_probabilities:
        row_sums = values.sum(axis=1)
        are_probabilities = np.allclose(row_sums, 1, atol=1e-2)
    if are_probabilities == from_logits:
        kind = "probabilities" if are_probabilities else "logits, which do not sum to 1"
        raise UsageError(
            f"old_from_logits={from_logits}: the old classifier returns {kind}; set it to"
            f" {not from_logits}"
        )
    return int(values.shape[1])
