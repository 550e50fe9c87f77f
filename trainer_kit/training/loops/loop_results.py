"""Readback: brings the results of a loop from graph to host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Readback:
    """Brings nested results from graph to host in one transfer: scalars are stacked as one float64 tensor.

    Args:
      results: A function that returns nested scalars, tensors or variables.
      compiled: graph_function or eager.
    """

    def __init__(self, results: Callable[[], Any], compiled: Callable[[Any], Any]) -> None:
        self._source = results
        self._structure: Any = None
        self._scalar: list[bool] = []
        self._dtypes: list[Any] = []
        self._compiled = compiled(self.pack)

    def __call__(self) -> Any:
        return self.unpack(self._compiled())[0]

    def pack(self, *more: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns (stacked scalars, the other tensors); remembers the structure when traced.

        Args:
          *more: Scalars to transfer with the results.
        """
        self._structure = self._source()
        scalars, others = self._packed()
        if more:
            scalars = tf.concat([scalars, tf.stack([tf.cast(one, tf.float64) for one in more])], 0)
        return scalars, others

    @tf.autograph.experimental.do_not_convert
    def _packed(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        tensors = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(self._structure)]
        self._structure = tf.nest.map_structure(lambda leaf: None, self._structure)
        self._scalar = [t.shape.rank == 0 and _fits_float64(t.dtype) for t in tensors]
        self._dtypes = [tensor.dtype.as_numpy_dtype for tensor in tensors]
        scalars = [tf.cast(t, tf.float64) for t, is_scalar in zip(tensors, self._scalar, strict=True) if is_scalar]
        others = [t for t, is_scalar in zip(tensors, self._scalar, strict=True) if not is_scalar]
        return tf.stack(scalars) if scalars else tf.zeros([0], tf.float64), others

    def unpack(self, packed: tuple[tf.Tensor, list[tf.Tensor]]) -> tuple[Any, list[float]]:
        """Returns the nested results as NumPy values of their original dtypes, and the values of `more`."""
        scalars, others = iter(packed[0].numpy()), iter(packed[1])
        leaves = [
            dtype(next(scalars)) if is_scalar else next(others).numpy()
            for is_scalar, dtype in zip(self._scalar, self._dtypes, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._structure, leaves), [float(one) for one in scalars]


def _fits_float64(dtype: tf.DType) -> bool:
    return dtype.is_floating or (dtype.is_integer and dtype.size < 8)
