"""What the modules of Tensorpack take from TensorFlow: the door's tfv1."""

from __future__ import annotations

import tensorflow as tf

from trainer_kit.compat.tensorpack import tfv1

__all__ = ["tfv1"]


def is_tfv2() -> bool:
    """Whether the program is written for TensorFlow 2, which it is not."""
    return False


def _backport_tensor_spec() -> type:
    """Returns the class of input signatures. Tensorpack's modules call it by this name."""
    spec: type = tf.TensorSpec
    return spec
