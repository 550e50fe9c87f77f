"""A small causal transformer over characters."""

from __future__ import annotations

from typing import Any

import keras

from trainer_kit.experiments.char_lm.config import CharLmModelConfig


@keras.saving.register_keras_serializable("char_lm")
class Positions(keras.layers.Layer):
    """Adds what is learned for each position to features [batch, positions, width]."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the weights, float [positions, width]."""
        self.offsets = self.add_weight(
            name="offsets", shape=input_shape[1:], initializer="random_normal"
        )

    def call(self, inputs: Any) -> Any:
        """Returns `inputs` with the positions' own features added."""
        return inputs + self.offsets


def build_transformer(config: CharLmModelConfig, vocabulary: int) -> keras.Model:
    """Returns the model.

    It maps characters, int32 [batch, context], to logits, float32 [batch, context, vocabulary].

    The logits at a position are for the next character, and depend on no later one. The convolution
    in front joins each character with those just before it: without it the attention has to learn
    to look one step back first, and half a minute of training ends a quarter of a bit higher.
    """
    layers = keras.layers
    characters = keras.Input((config.context,), dtype="int32", name="characters")
    features = layers.Embedding(vocabulary, config.width)(characters)
    features += layers.Conv1D(config.width, config.convolution, padding="causal")(features)
    features = Positions()(features)
    for _ in range(config.layers):
        normed = layers.RMSNormalization()(features)
        attention = layers.MultiHeadAttention(config.heads, config.width // config.heads)
        features += attention(normed, normed, use_causal_mask=True)
        hidden = layers.Dense(4 * config.width, activation="relu")(
            layers.RMSNormalization()(features)
        )
        features += layers.Dense(config.width)(hidden)
    # The softmax wants float32, under mixed precision too.
    logits = layers.Dense(vocabulary, dtype="float32", name="logits")(
        layers.RMSNormalization()(features)
    )
    return keras.Model(characters, logits, name="char_lm")
