"""What programs written for Model Garden's Trainer expect of one: its attributes, and `.numpy()` of what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class TrainerNames:
    """Attributes of Model Garden's Trainer that subclasses use in their own steps; to be inherited from."""

    train_loss: Any
    train_metrics: Any
    validation_loss: Any
    validation_metrics: Any
    checkpoint: Any
    _run_options: Any

    @property
    def _train_loss(self) -> Any:
        return self.train_loss

    @property
    def _train_metrics(self) -> Any:
        return self.train_metrics

    @property
    def _validation_loss(self) -> Any:
        return self.validation_loss

    @property
    def _validation_metrics(self) -> Any:
        return self.validation_metrics

    @property
    def _checkpoint(self) -> tf.train.Checkpoint:
        return self.checkpoint

    @property
    def _runtime_options(self) -> tf.distribute.RunOptions:
        return self._run_options


def with_numpy(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs whose NumPy numbers have the method `numpy()`, as the tensors have that Model Garden returns."""
    return {name: with_numpy(one) if isinstance(one, Mapping) else _with_numpy(one) for name, one in logs.items()}


def _with_numpy(value: Any) -> Any:
    kind = _KINDS.get(type(value))
    return value if kind is None else kind(value)


def _kind(number: Any) -> Any:
    """Returns a subclass of a NumPy type that has the method `numpy()`; it is pickled as that type."""
    methods = {"numpy": lambda self: number(self), "__reduce__": lambda self: number(self).__reduce__()}
    return type(number.__name__, (number,), methods)


_KINDS = {number: _kind(number) for number in (np.float32, np.float64, np.int32, np.int64)}
