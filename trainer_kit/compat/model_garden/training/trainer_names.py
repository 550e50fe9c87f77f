"""Attributes and results that programs written for Model Garden's Trainer expect, such as `.numpy()` on logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class TrainerNames:
    """Mixin with the private attributes of Model Garden's Trainer that subclasses use in their own steps."""

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
    """Returns logs whose NumPy numbers have a method `numpy()`, like the tensors that Model Garden returns."""
    return {name: with_numpy(one) if isinstance(one, Mapping) else _with_numpy(one) for name, one in logs.items()}


def _with_numpy(value: Any) -> Any:
    kind = _KINDS.get(type(value))
    return value if kind is None else kind(value)


def _kind(number: Any) -> Any:
    """Returns a subclass of a NumPy scalar type with a method `numpy()`; it is pickled as the NumPy type."""
    methods = {"numpy": lambda self: number(self), "__reduce__": lambda self: number(self).__reduce__()}
    return type(number.__name__, (number,), methods)


_KINDS = {number: _kind(number) for number in (np.float32, np.float64, np.int32, np.int64)}
