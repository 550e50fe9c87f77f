"""RuntimeConfig -> Keras' dtype policy."""

from __future__ import annotations

import sys

import keras

from trainer_kit.config.runtime import RuntimeConfig

_POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


def set_precision(runtime: RuntimeConfig) -> None:
    """Sets the policy of layers made from now on: float16 and bfloat16 compute in that type and keep float32 weights.

    Without a mixed_precision_dtype the policy stays what it is. tf_keras gets the same policy if it is in use, that is
    imported.

    Args:
      runtime: its mixed_precision_dtype is used. The loss scale of float16 belongs to the optimizer.
    """
    dtype = runtime.mixed_precision_dtype
    if dtype is None:
        return
    policy = _POLICIES.get(dtype, dtype)
    keras.config.set_dtype_policy(policy)
    keras_2 = sys.modules.get("tf_keras")
    if keras_2 is not None:
        keras_2.mixed_precision.set_global_policy(policy)
