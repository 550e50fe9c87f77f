"""Alternatives to trainer_kit: Keras' fit and Model Garden, each also on trainer_kit's engine.

Each function is run by a process of its own, takes its turns from a Pacer and never returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tf_keras
from official.common import distribute_utils
from official.core import base_task, config_definitions, train_lib
from official.modeling import optimization

from scripts.benchmarks import nets
from scripts.benchmarks.ours import ENDLESS, build_endless_settings, constant_rate
from scripts.benchmarks.pacer import Pacer
from trainer_kit.compat import keras as keras_door
from trainer_kit.compat import model_garden as model_garden_door


class EpochTurns(keras.callbacks.Callback):
    """Callback that takes turns at the ends of epochs, so that it costs nothing during an epoch."""

    def __init__(self, pacer: Pacer, steps: int) -> None:
        super().__init__()
        self._pacer = pacer
        self._steps = steps

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._pacer.report_steps(self._steps)


class BatchLoss(keras.callbacks.Callback):
    """Callback that reads the loss of each batch."""

    loss: float | None = None

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.loss = (logs or {})["loss"]


def keras_fit(
    pacer: Pacer,
    folder: str,
    *,
    net: str,
    epoch: int,
    source: str = "arrays",
    at_once: int = 1,
    reads_batches: bool = False,
    is_ours: bool = False,
    **options: Any,
) -> None:
    """Trains by compile and fit.

    Args:
      pacer: The pacer that assigns the turns.
      folder: The parent folder of model_dir.
      net: See nets.build.
      epoch: The steps of an epoch.
      source: "arrays", or "pipeline", the tf.data pipeline of the hand-written loops.
      at_once: steps_per_execution.
      reads_batches: Whether a callback reads the loss of each batch.
      is_ours: Whether trainer_kit trains.
      **options: Further arguments of trainer_kit's fit.
    """
    model = nets.build(keras, net)
    model.compile(
        nets.optimizer(keras, net),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=nets.accuracies(keras, 1),
        steps_per_execution=at_once,
    )

    if source == "pipeline":
        data = {"x": nets.pipeline(net), "steps_per_epoch": epoch}
    else:
        features, labels = nets.arrays(net, epoch * nets.BATCH)
        data = {"x": features, "y": labels, "batch_size": nets.BATCH}

    callbacks: list[Any] = [EpochTurns(pacer, epoch)]
    if reads_batches:
        callbacks.append(BatchLoss())
    arguments = {**data, "epochs": ENDLESS, "verbose": 0, "callbacks": callbacks}

    if is_ours:
        keras_door.fit(model, **arguments, model_dir=f"{folder}/run", **options)
    else:
        model.fit(**arguments)


class PeerTask(base_task.Task):
    """One of the nets as a Model Garden task."""

    def __init__(self, params: Any, net: str) -> None:
        super().__init__(params)
        self._net = net

    def build_model(self) -> Any:
        """Returns the net, of tf_keras."""
        return nets.build(tf_keras, self._net)

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the data."""
        return nets.pipeline(self._net)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy."""
        return nets.loss(tf_keras, labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the accuracy."""
        return nets.accuracies(tf_keras, 1)


def model_garden(
    pacer: Pacer, folder: str, *, net: str, loop: int, strategy: str = "", is_ours: bool = False
) -> None:
    """Trains with Model Garden's runner, or with the same settings on trainer_kit's engine."""
    optimizer = {
        "optimizer": {"type": nets.optimizer_name(net)},
        "learning_rate": constant_rate(nets.LEARNING_RATE),
    }
    config = config_definitions.ExperimentConfig(
        trainer=config_definitions.TrainerConfig(
            **build_endless_settings(loop),
            optimizer_config=optimization.OptimizationConfig(optimizer),
        )
    )
    if is_ours:
        distribution = model_garden_door.get_distribution_strategy()
    else:
        distribution = distribute_utils.get_distribution_strategy(strategy)
    with distribution.scope():
        task = PeerTask(config.task, net)
    arguments = (distribution, task, "train", config, f"{folder}/run")
    turns = [lambda logs: pacer.report_steps(loop)]

    if is_ours:
        model_garden_door.run_experiment(*arguments, train_actions=turns)
        return
    runner = train_lib.OrbitExperimentRunner(*arguments, train_actions=turns)
    with distribution.scope():
        runner.controller.train(ENDLESS)
