"""Turns the error of the gradient processor `check` into a divergence that names the variable and the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from trainer_kit.errors import DivergedError
from trainer_kit.optimizers.gradient_processors import refused_gradient


class GradientDivergence(DivergedError):
    """Raised when a gradient is not finite. The step has not updated the weights.

    Args:
      variable: The path of the variable whose gradient it is.
      step: The global step that failed.

    Attributes:
      step: The argument of this name.
    """

    def __init__(self, variable: str, step: int) -> None:
        super().__init__(f"the gradient of {variable} is not finite at step {step} (the gradient processor check)")
        self.step = step


@contextlib.contextmanager
def reporting_gradients() -> Iterator[None]:
    """Raises GradientDivergence in place of the error of a step whose gradients were refused.

    Runs eagerly, on the host.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if refused := refused_gradient(error):
            raise GradientDivergence(*refused) from error
        raise
