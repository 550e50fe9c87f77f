"""`Model.fit`, by Keras and on trainer_kit's engine: the same model, data and arguments.

The function is run by a process of its own, takes its turns from a Pacer and never returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from scripts.benchmarks import nets, samples
from scripts.benchmarks.others import FOR_EVER, Turns
from scripts.benchmarks.pacer import Pacer
from trainer_kit.compat import keras as tk_keras


def fit(
    pacer: Pacer, folder: str, *, net: str, steps: int, door: bool, at_once: int = 1,
    by_batch: bool = False, options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Trains on arrays in epochs of `steps` steps, with everything else as it comes.

    Args:
      pacer: The pacer that assigns the turns.
      folder: The parent folder of model_dir.
      net: A net of `nets`.
      steps: The number of steps in an epoch.
      door: Whether trainer_kit trains.
      at_once: steps_per_execution.
      by_batch: Whether a callback looks at the loss of each batch.
      options: Further arguments of trainer_kit's fit.
    """
    model = nets.build(keras, net)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = nets.accuracies(keras, 1)
    model.compile(nets.optimizer(keras, net), loss, metrics=accuracy, steps_per_execution=at_once)
    given: dict[str, Any] = {"batch_size": samples.BATCH, "epochs": FOR_EVER, "verbose": 0}
    given["callbacks"] = [Turns(pacer, steps), *([_Loss()] if by_batch else [])]
    x, y = samples.arrays(net, steps * samples.BATCH)
    if door:
        tk_keras.fit(model, x, y, **given, model_dir=f"{folder}/run", **(options or {}))
    else:
        model.fit(x, y, **given)


class _Loss(keras.callbacks.Callback):
    last: float | None = None

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.last = (logs or {})["loss"]
