"""Names of Tensorpack 0.8 that 0.11 does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.input_source.input_source_base import build_or_reuse_placeholder
from trainer_kit.compat.tensorpack.train.model_desc import ModelDescBase
from trainer_kit.compat.tensorpack.train.tower import TowerTrainer

__all__ = ["InputDesc"]


class InputDesc(tf.TensorSpec):
    """Describes an input of a model. It is a tf.TensorSpec with the arguments of version 0.8.

    Args:
      type: The dtype.
      shape: The shape.
      name: The name.
    """

    def __init__(self, type: tf.DType, shape: Any, name: str) -> None:
        super().__init__(shape, type, name)

    @property
    def type(self) -> tf.DType:
        """The dtype."""
        return self.dtype

    def build_placeholder(self) -> tf.Tensor:
        """Returns the placeholder of the input. Called in graph."""
        return build_or_reuse_placeholder(self)

    build_placeholder_reuse = build_placeholder


def describe_inputs(signature: Sequence[tf.TensorSpec]) -> list[InputDesc]:
    """Returns an input signature as InputDescs."""
    return [InputDesc(spec.dtype, spec.shape, spec.name) for spec in signature]


def get_inputs_desc(model: ModelDescBase) -> list[InputDesc]:
    return describe_inputs(model.get_input_signature())


def get_tower_inputs_desc(trainer: TowerTrainer) -> list[InputDesc]:
    return describe_inputs(trainer.input_signature)


ModelDescBase.get_inputs_desc = get_inputs_desc
TowerTrainer.inputs_desc = property(get_tower_inputs_desc)
