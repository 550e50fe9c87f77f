"""The task of `bct_digits`: nets, classification loss, influence loss, and the cross-test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import trainer_kit
from trainer_kit import DataConfig

HELD_OUT = 360  # a fifth of the 1,797 images


class BctDigitsTask(trainer_kit.Task):
    """Learns embeddings of digits.

    If there is an old model, its classifier understands the embeddings.

    Backward-compatible training (Shen et al. 2020, arXiv 2003.11942): the loss is the cross entropy
    of the new classifier plus, times `influence_weight`, the influence loss: the cross entropy of
    the old classifier, which is frozen, at the new embeddings.

    The metrics are shares of held-out images, the queries, for which the most similar one of the
    other images, the gallery, shows the same digit. In `compute_retrieval` the trained model embeds
    both. With an old model there are `cross_retrieval`, where the trained model embeds the query
    and the old one the gallery, and `old_retrieval`, where the old one embeds both. The images are
    those of the digits that the old model has learned (without an old model: the model itself); the
    same metrics of all ten digits are called `retrieval_all` and so on.
    """

    def build_model(self) -> keras.Model:
        """Returns the model: images [batch, 8, 8, 1] of float32 in 0..1 to tensors by name.

        These are `embedding`, [batch, embedding_size], and `logits`, [batch, digits]; with an old
        model also `old_embedding`, and `old_logits`, those of the old classifier at the new
        embedding.
        """
        params = self.task_config
        images = keras.Input((8, 8, 1), name="images")
        encoder, classifier = build_encoder_and_classifier(params.net, params.embedding_size)
        embedding = encoder(images)
        outputs = {"embedding": embedding, "logits": classifier(embedding)}
        if params.old_model.run:
            old_encoder, old_classifier = self._build_old_layers()
            outputs["old_embedding"] = old_encoder(images)
            outputs["old_logits"] = old_classifier(embedding)
        return keras.Model(images, outputs, name="bct_digits")

    def initialize(self, model: keras.Model) -> None:
        """Loads the old model's weights. A run that is resumed has them in its checkpoints."""
        super().initialize(model)
        params = self.task_config.old_model
        if params.run:
            old = BctDigitsTask(
                self.task_config.replace(net=params.net, old_model={"run": ""})
            ).build_model()
            trainer_kit.load_weights(old, params.run)
            for name in ("encoder", "classifier"):
                model.get_layer(f"old_{name}").set_weights(old.get_layer(name).get_weights())

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> trainer_kit.ArraySource:
        """Returns images and digits.

        They are of the digits `net.digits` of the training part or, to evaluate, all of the other.
        """
        del input_context  # the source gets it when it is asked for its dataset
        images, digits = split_digits()[0 if params.is_training else 1]
        learned = (
            np.isin(digits, self.task_config.net.digits) if params.is_training else slice(None)
        )
        return trainer_kit.ArraySource((images[learned], digits[learned]), params)

    def build_losses(
        self, labels: Any, model_outputs: Any, aux_losses: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the classification loss plus the weighted influence loss, in nats."""
        loss = masked_cross_entropy(labels, self.task_config.net.digits, model_outputs["logits"])
        old = self.task_config.old_model
        if "old_logits" in model_outputs and old.influence_weight:
            loss += old.influence_weight * masked_cross_entropy(
                labels, old.net.digits, model_outputs["old_logits"]
            )
        return loss + super().build_losses(labels, model_outputs, aux_losses)

    def validation_step(
        self, inputs: Any, model: Any, metrics: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Returns the loss, and the embeddings and digits that `aggregate_logs` collects."""
        images, digits = inputs
        outputs = self.inference_step(images, model)
        loss = self.batch_loss(model, images, digits, outputs)
        embeddings = {name: value for name, value in outputs.items() if name.endswith("embedding")}
        return {self.loss: loss, "digits": digits, **embeddings}

    def aggregate_logs(
        self, state: dict[str, list[np.ndarray]] | None, step_logs: Mapping[str, Any]
    ) -> dict[str, list[np.ndarray]]:
        """Adds the embeddings and digits of a batch, of all replicas. Eager, on the host."""
        state = state or {}
        for name in ("digits", "embedding", "old_embedding"):
            state.setdefault(name, []).extend(
                np.asarray(values) for values in step_logs.get(name, ())
            )
        return state

    def reduce_aggregated_logs(
        self, aggregated_logs: Mapping[str, list[np.ndarray]], global_step: tf.Tensor | None = None
    ) -> dict[str, float]:
        """Returns the metrics. Eager, on the host."""
        del global_step
        digits, new, *old = [np.concatenate(parts) for parts in aggregated_logs.values() if parts]
        pairs = {"retrieval": (new, new)}
        if old:
            pairs |= {"cross_retrieval": (new, old[0]), "old_retrieval": (old[0], old[0])}
        is_known = np.isin(
            digits, self.task_config.old_model.net.digits if old else self.task_config.net.digits
        )
        results = {}
        for name, (queries, gallery) in pairs.items():
            results[name] = compute_retrieval(
                queries[is_known], gallery[is_known], digits[is_known]
            )
            results[f"{name}_all"] = compute_retrieval(queries, gallery, digits)
        return results

    def _build_old_layers(self) -> list[keras.Layer]:
        params = self.task_config
        layers = build_encoder_and_classifier(
            params.old_model.net, params.embedding_size, prefix="old_"
        )
        for layer in layers:
            layer.trainable = False  # no optimizer gets its variables
        return layers


def build_encoder_and_classifier(
    net: Any, embedding_size: int, prefix: str = ""
) -> list[keras.Layer]:
    """Returns a net from images to embeddings and a layer from embeddings to logits.

    Args:
      net: An EmbeddingNetConfig.
      embedding_size: The number of values in an embedding.
      prefix: What the names of both begin with.
    """
    layers = [
        keras.layers.Conv2D(net.width, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(2 * net.width, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(2 * net.width, 3, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(embedding_size),
    ]
    encoder = keras.Sequential([keras.Input((8, 8, 1)), *layers], name=f"{prefix}encoder")
    return [encoder, keras.layers.Dense(len(net.digits), name=f"{prefix}classifier")]


def masked_cross_entropy(digits: Any, classes: Sequence[int], logits: Any) -> tf.Tensor:
    """Returns the mean cross entropy, in nats.

    Examples of other digits than `classes` add 0.

    In graph, on a replica. TensorFlow's softmax cross entropy is not used: it takes the targets of
    each example for a distribution, and gives an example without a target, a row of zeros, the
    gradient softmax(logits) in place of 0.

    Args:
      digits: The digits of the examples, int [batch].
      classes: The digit of each logit.
      logits: Float [batch, classes].
    """
    targets = tf.cast(tf.equal(digits[:, None], tf.constant(classes, digits.dtype)), logits.dtype)
    return -tf.reduce_mean(tf.reduce_sum(targets * tf.nn.log_softmax(logits), axis=1))


def compute_retrieval(queries: np.ndarray, gallery: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of queries whose most similar example in the gallery has their label.

    The query itself is left out.

    Args:
      queries: The embeddings of all examples by one model, float [examples, size].
      gallery: Their embeddings by the same or another model, of the same shape.
      labels: Their labels, int [examples].
    """
    unit = [
        embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
        for embeddings in (queries, gallery)
    ]
    similarity = unit[0] @ unit[1].T  # the cosine
    np.fill_diagonal(similarity, -np.inf)
    return float(np.mean(labels[similarity.argmax(1)] == labels))


def split_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns ((images, digits) to train on, (images, digits) held out).

    They are 1,437 and 360 examples, always the same ones.

    Every digit has the same share in both, and no image is in both. Images are float32 [n, 8, 8, 1]
    in 0..1, digits int32 [n].
    """
    data = load_digits()
    images = (data.images[..., None] / 16).astype(np.float32)
    digits = data.target.astype(np.int32)
    parts = train_test_split(images, digits, test_size=HELD_OUT, stratify=digits, random_state=0)
    return (parts[0], parts[2]), (parts[1], parts[3])
