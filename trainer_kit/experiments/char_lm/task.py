"""The task of `char_lm`: windows of text, the transformer, its loss and its metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import trainer_kit
from trainer_kit import DataConfig
from trainer_kit.experiments.char_lm.model import build_transformer
from trainer_kit.experiments.char_lm.text import (
    VOCABULARY,
    cut_windows,
    find_standard_library,
    read_text,
)


class CharLmTask(trainer_kit.Task):
    """Predicts each character from those before it, by cross entropy.

    The metric is `bits_per_character`.
    """

    def build_model(self) -> keras.Model:
        """Returns the transformer.

        It maps characters, int32 [batch, context], to logits [batch, context, VOCABULARY].
        """
        self.tokens_per_example = self.task_config.model.context
        return build_transformer(self.task_config.model, VOCABULARY)

    def build_inputs(
        self, params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> trainer_kit.ArraySource:
        """Returns (characters, next characters), int32 [batch, context] each.

        They are of the training or the held-out files.

        Raises:
          DataError: when there are no sources to read.
        """
        del input_context  # the source gets it when it is asked for its dataset
        config = self.task_config
        text = read_text(
            Path(config.folder or find_standard_library()), held_out=not params.is_training
        )
        most = 0 if params.is_training else config.evaluated_windows
        return trainer_kit.ArraySource(
            cut_windows(text, config.model.context, most), params, transform=split_targets
        )

    def build_losses(
        self, labels: Any, model_outputs: Any, aux_losses: Sequence[tf.Tensor] | None = None
    ) -> tf.Tensor:
        """Returns the mean cross entropy of a character, in nats."""
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model_outputs)
        return tf.reduce_mean(losses) + super().build_losses(labels, model_outputs, aux_losses)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the mean of the bits that a character costs."""
        return [keras.metrics.MeanMetricWrapper(compute_bits, name="bits_per_character")]


def split_targets(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (characters, next characters), int32 [batch, length] each.

    Runs in a graph, on windows [batch, length + 1].
    """
    characters = tf.cast(batch, tf.int32)
    return characters[:, :-1], characters[:, 1:]


def compute_bits(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Returns the cross entropy of each character in bits, float [batch, length].

    The logits are [batch, length, n].
    """
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits) / math.log(2)
