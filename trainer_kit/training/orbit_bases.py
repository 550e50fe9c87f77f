"""Orbit's abstract classes where Orbit is installed, else classes with the same methods.

Orbit comes with TF Model Garden, in the extra `model-garden`. Only Orbit's own programs need its
classes, so a Trainer is one of them where there can be such a program.
"""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

try:
    # The package that is called orbit in package indexes is another one, without these names.
    from orbit import AbstractEvaluator, AbstractTrainer
except ImportError as error:
    if error.name != "orbit":
        raise
    # Orbit imports tf_keras. A run's seeds and precision reach an imported tf_keras only.
    with contextlib.suppress(ImportError):
        import tf_keras  # noqa: F401

    if not TYPE_CHECKING:

        class AbstractTrainer(tf.Module, metaclass=abc.ABCMeta):
            """A trainer, as Orbit defines it."""

            @abc.abstractmethod
            def train(self, num_steps: tf.Tensor) -> Any:
                """Trains `num_steps` steps. Returns logs, or None."""

        class AbstractEvaluator(tf.Module, metaclass=abc.ABCMeta):
            """An evaluator, as Orbit defines it."""

            @abc.abstractmethod
            def evaluate(self, num_steps: tf.Tensor) -> Any:
                """Evaluates `num_steps` batches, -1 for all. Returns logs, or None."""


__all__ = ["AbstractEvaluator", "AbstractTrainer"]
