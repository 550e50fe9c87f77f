"""The types of objects that Keras 3 and tf_keras provide.

The two libraries have no classes in common, and tf_keras need not be installed. The protocols state
what both have. See trainer_kit.typing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback
from trainer_kit.typing import Metric, Model, Optimizer

# The argument `class_weight` of `Model.fit`: the weights of examples, by class.
ClassWeight: TypeAlias = Mapping[int, float]


class KerasCallback(Protocol):
    """A callback of Keras 3 or tf_keras, or of a user.

    Its other methods are called by their names.
    """

    def set_params(self, params: dict[str, Any]) -> None:
        """Tells the numbers of epochs and steps, and the verbosity."""

    def set_model(self, model: CompiledModel) -> None:
        """Tells the model that is trained."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins an epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends an epoch. It may add logs."""


class History(KerasCallback, Protocol):
    """The callback of Keras that keeps the logs of all epochs."""

    # The epochs, counted from 0.
    epoch: list[int]
    # For each log its value in each epoch.
    history: dict[str, list[Any]]


class CSVLogger(KerasCallback, Protocol):
    """The callback of Keras that writes the logs of each epoch into a file."""

    filename: str
    # Whether the file is continued, and whether it gets a row of names.
    append: bool
    append_header: bool
    writer: object

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the file."""


class CompiledModel(Model, Protocol):
    """A compiled model of Keras 3 or tf_keras."""

    optimizer: Optimizer | None
    history: History
    stop_training: bool
    run_eagerly: bool
    jit_compile: bool | str

    @property
    def metrics(self) -> list[Metric]:
        """The metrics, those of the loss and of layers included."""

    @property
    def distribute_strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope the model was created."""

    def train_step(self, data: Any) -> Mapping[str, Any]:
        """Trains on a batch of a replica and returns the logs."""

    def test_step(self, data: Any) -> Mapping[str, Any]:
        """Evaluates a batch of a replica and returns the logs."""

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the results of the metrics by name."""

    def reset_metrics(self) -> None:
        """Resets the metrics."""

    def predict(self, x: Any, **options: Any) -> Any:
        """Returns the outputs for the inputs `x`."""


# The argument `callbacks` of `Model.fit`: a list, one callback or a CallbackList of Keras. Beside
# callbacks of Keras it may contain those of trainer_kit.
Callbacks: TypeAlias = Sequence[Callback | KerasCallback] | Callback | KerasCallback | None
