"""Functions of Tensorpack that fail with TensorFlow 2 or NumPy 2, with replacements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import trainer_kit.compat.tensorpack.callbacks.monitor as monitor
import trainer_kit.compat.tensorpack.tfutils.optimizer as optimizer
import trainer_kit.compat.tensorpack.tfutils.summary as summary
from trainer_kit.compat.tensorpack import tfv1
from trainer_kit.compat.tensorpack.input_source.input_source_base import ProxyInputSource
from trainer_kit.compat.tensorpack.models.linearwrap import LinearWrap
from trainer_kit.compat.tensorpack.tfutils.gradproc import FilterNoneGrad

_v1: Any = tf.compat.v1


def create_image_summary(name: str, val: np.ndarray) -> Any:
    """Returns a summary of images. Runs on the host.

    Args:
      name: The name.
      val: The images, of shape [N, height, width, channels], with values of 0 to 255.
    """
    images = _v1.Summary()
    for index, image in enumerate(val.astype(np.uint8)):
        height, width, channels = image.shape
        with tf.init_scope():
            png = tf.io.encode_png(image).numpy()
        content = _v1.Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=png
        )
        tag = name
        if len(val) > 1:
            tag = f"{name}/{index}"
        images.value.add(tag=tag, image=content)
    return images


def apply_accumulated_gradients(
    self: Any,
    grads_and_vars: Sequence[tuple[Any, tf.Variable]],
    global_step: tf.Variable | None = None,
    name: str | None = None,
) -> tf.Operation:
    """Returns the operation that applies the sum of the gradients in every `niter`-th step.

    Called in graph. The original reads its counter while it is incremented, so that the step in
    which it applies the sum is left to chance.
    """
    pairs = FilterNoneGrad().process(grads_and_vars)
    variables = [variable for _, variable in pairs]
    with tf.control_dependencies(None):
        slots = self._create_accum_slots(variables)
        with _v1.variable_scope(self._name):
            counter = _v1.Variable(0, trainable=False, name="counter", dtype=tf.int32)

    def apply_sums() -> tf.Operation:
        update = self._opt.apply_gradients(list(zip(slots, variables, strict=True)))
        with tf.control_dependencies([update]):
            return tf.group(*[slot.assign(tf.zeros_like(slot)).op for slot in slots])

    with tf.name_scope("AccumGradOptimizer"):
        additions = []
        for slot, (gradient, _) in zip(slots, pairs, strict=True):
            additions.append(slot.assign_add(gradient).op)
        count = tf.identity(counter.assign_add(1))
        with tf.control_dependencies(additions):
            is_due = tf.equal(count % self._niter, 0)
            update = tf.cond(is_due, apply_sums, tf.no_op)
    if global_step is not None:
        update = tf.group(update, global_step.assign_add(1).op)
    return tf.group(update, name=name)


def get_inner_callbacks(self: ProxyInputSource) -> list[Any]:
    """Returns the callbacks of an input that a proxy contains, without the one that restarts it.

    The original has it twice, and the second one would drop the place of a checkpoint.
    """
    callbacks: list[Any] = self._input._get_callbacks()
    return callbacks


class TensorFlowFunctions(LinearWrap._TFModuleFunc):
    """The functions of `LinearWrap(x).tf`, which are those of TensorFlow 1."""

    def __init__(self, module: Any, tensor: tf.Tensor) -> None:
        if module is tf:
            module = tfv1
        super().__init__(module, tensor)


def mend_functions() -> None:
    """Sets the functions in the modules of the installed package."""
    LinearWrap._TFModuleFunc = TensorFlowFunctions
    ProxyInputSource._get_callbacks = get_inner_callbacks
    for module in (summary, monitor):
        module.create_image_summary = create_image_summary
    optimizer.AccumGradOptimizer.apply_gradients = apply_accumulated_gradients
