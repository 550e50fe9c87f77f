"""`tensorpack.contrib.keras`, which the door refuses: there is a door for Keras."""

from __future__ import annotations

from typing import Any

from trainer_kit.compat.tensorpack.program_errors import ProgramError

__all__ = ["KerasPhaseCallback", "setup_keras_trainer", "KerasModel"]


def setup_keras_trainer(*arguments: Any, **options: Any) -> None:
    """Is not supported.

    Raises:
      UsageError: Always.
    """
    message = (
        "tensorpack.contrib.keras trains models of Keras in a session of TensorFlow 1; compile the"
        " model, and train it with trainer_kit.compat.keras.fit"
    )
    raise ProgramError(message)


class KerasModel:
    """Is not supported. See setup_keras_trainer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        setup_keras_trainer()


class KerasPhaseCallback(KerasModel):
    """Is not supported. See setup_keras_trainer."""
