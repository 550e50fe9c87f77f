"""Alternatives to trainer_kit: Keras' fit, and Model Garden.

Each function is run by a process of its own, takes its turns from a Pacer and never returns.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
import tf_keras
from official.common import distribute_utils
from official.core import base_task, base_trainer, config_definitions, train_lib
from official.modeling import optimization

from scripts.benchmarks import nets, samples
from scripts.benchmarks.pacer import Pacer
from trainer_kit.compat import model_garden as model_garden_door

FOR_EVER = 10**9


class Turns(keras.callbacks.Callback):
    """Callback that takes turns at the ends of epochs, so that nothing is called during an epoch."""

    def __init__(self, pacer: Pacer, steps: int) -> None:
        super().__init__()
        self._pacer, self._steps = pacer, steps

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._pacer.done(self._steps)


def keras_fit(pacer: Pacer, folder: str, *, net: str, epoch: int, at_once: int) -> None:
    """Trains by compile and fit in epochs of `epoch` steps, with steps_per_execution=`at_once`."""
    del folder
    model = nets.build(keras, net)
    model.compile(
        nets.optimizer(keras, net),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=nets.accuracies(keras, 1),
        steps_per_execution=at_once,
    )
    turns = [Turns(pacer, epoch)]
    model.fit(nets.pipeline(net), steps_per_epoch=epoch, epochs=FOR_EVER, verbose=0, callbacks=turns)


class PeerTask(base_task.Task):
    """One of the nets as a Model Garden task."""

    def __init__(self, params: Any, net: str, examples: int = 0) -> None:
        super().__init__(params)
        self._net, self._examples = net, examples

    def build_model(self) -> Any:
        """Returns the net, of tf_keras."""
        return nets.build(tf_keras, self._net)

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the data: validation data if a number of examples was given, else training data."""
        return nets.one_pass(self._net, self._examples) if self._examples else nets.pipeline(self._net)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy."""
        return nets.loss(tf_keras, labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the accuracy."""
        return nets.accuracies(tf_keras, 1)


def _garden_config(net: str, loop: int) -> config_definitions.ExperimentConfig:
    rate = {"type": "constant", "constant": {"learning_rate": samples.RATE}}
    return config_definitions.ExperimentConfig(
        trainer=config_definitions.TrainerConfig(
            train_steps=FOR_EVER,
            steps_per_loop=loop,
            checkpoint_interval=FOR_EVER,
            optimizer_config=optimization.OptimizationConfig(
                {"optimizer": {"type": samples.optimizer_name(net)}, "learning_rate": rate}
            ),
        )
    )


def model_garden(pacer: Pacer, folder: str, *, net: str, loop: int, strategy: str) -> None:
    """Trains with Model Garden's runner, in loops of `loop` steps and without a checkpoint."""
    config = _garden_config(net, loop)
    distribution = distribute_utils.get_distribution_strategy(strategy)
    with distribution.scope():
        task = PeerTask(config.task, net)
    runner = train_lib.OrbitExperimentRunner(
        distribution, task, "train", config, f"{folder}/run", train_actions=[lambda logs: pacer.done(loop)]
    )
    with distribution.scope():
        runner.controller.train(FOR_EVER)


def model_garden_on_ours(pacer: Pacer, folder: str, *, net: str, loop: int) -> None:
    """Trains the same Model Garden task on trainer_kit's engine, with the same settings."""
    config = _garden_config(net, loop)
    distribution = model_garden_door.get_distribution_strategy()
    with distribution.scope():
        task = PeerTask(config.task, net)
    turns = [lambda logs: pacer.done(loop)]
    model_garden_door.run_experiment(distribution, task, "train", config, f"{folder}/run", train_actions=turns)


def model_garden_evaluate(pacer: Pacer, folder: str, *, net: str, examples: int) -> None:
    """Evaluates all of the data repeatedly with Model Garden's trainer."""
    del folder
    config = config_definitions.ExperimentConfig()
    task = PeerTask(config.task, net, examples)
    trainer = base_trainer.Trainer(config, task, task.build_model(), tf_keras.optimizers.SGD(), train=False)
    steps = tf.constant(-1)
    while True:
        [float(value) for value in trainer.evaluate(steps).values()]
        pacer.done(-(-examples // samples.BATCH))
