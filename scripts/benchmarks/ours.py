"""trainer_kit as its users run it: a Task, a config, and run_experiment.

Each function is run by a process of its own, takes its turns from a Pacer, which is the last of
the run's train_actions, and never returns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import trainer_kit as tk
from scripts.benchmarks import nets
from scripts.benchmarks.by_hand import LeastLoss
from scripts.benchmarks.pacer import Pacer
from trainer_kit.run.controller import Controller
from trainer_kit.run.launcher import prepare_runtime

ENDLESS = 10**9  # steps


@tk.configclass
class BenchConfig(tk.TaskConfig):
    """One of the nets.

    Attributes:
      net, size: See `nets.build`.
      metrics: The number of metrics.
      source: "pipeline", the tf.data pipeline of the hand-written loops, or "arrays", an
        ArraySource.
      examples: The number of validation examples.
    """

    net: str = "dense"
    size: int = 0
    metrics: int = 1
    source: str = "pipeline"
    examples: int = nets.EXAMPLES
    train_data: tk.DataConfig = tk.DataConfig(is_training=True, global_batch_size=nets.BATCH)
    validation_data: tk.DataConfig = tk.DataConfig(
        global_batch_size=nets.BATCH, drop_remainder=False
    )


@tk.register_task(BenchConfig)
class BenchTask(tk.Task):
    """Trains one of the nets."""

    def build_model(self) -> Any:
        """Returns the net."""
        return nets.build(keras, self.task_config.net, self.task_config.size)

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> Any:
        """Returns the data."""
        config = self.task_config
        if config.source == "arrays":
            examples = nets.EXAMPLES if params.is_training else config.examples
            return tk.ArraySource(nets.arrays(config.net, examples), params)
        if not params.is_training:
            return nets.one_pass(config.net, config.examples)

        batch = params.global_batch_size
        if input_context:
            batch = input_context.get_per_replica_batch_size(batch)
        return nets.pipeline(config.net, batch)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy."""
        return nets.loss(keras, labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the accuracies."""
        return nets.accuracies(keras, self.task_config.metrics)


def train(
    pacer: Pacer,
    folder: str,
    *,
    net: str,
    loop: int,
    size: int = 0,
    metrics: int = 1,
    replicas: int = 0,
    source: str = "pipeline",
    trainer: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
    actions: int = 0,
) -> None:
    """Trains in loops of `loop` steps with default settings, and without a checkpoint.

    Args:
      pacer: The pacer that assigns the turns.
      folder: The parent folder of model_dir.
      net, size: See nets.build.
      loop: The steps of a loop.
      metrics: The number of metrics.
      replicas: The number of virtual CPUs; 0: the CPU is not split.
      source: See BenchConfig.
      trainer, runtime: Further settings in these sections.
      actions: The number of train_actions in addition to the pacer.
    """
    task = {"size": size, "metrics": metrics, "source": source}
    config = make_config(net, loop, task, trainer, {"virtual_cpus": replicas, **(runtime or {})})
    train_actions = [*(LeastLoss() for _ in range(actions)), lambda logs: pacer.report_steps(loop)]
    tk.launch(config, "train", f"{folder}/run", train_actions=train_actions)


def evaluate(
    pacer: Pacer, folder: str, *, net: str, examples: int, source: str = "pipeline"
) -> None:
    """Evaluates all of the data repeatedly with Trainer.evaluate."""
    del folder
    config = make_config(net, 1, {"examples": examples, "source": source})
    with prepare_runtime(config).scope():
        task = BenchTask(config.task)
        evaluator = tk.Trainer(config, task, task.build_model(), None, train=False)

    steps = tf.constant(-1)
    while True:
        evaluator.evaluate(steps)
        pacer.report_steps(-(-examples // nets.BATCH))


class TimedController(Controller):
    """Controller that measures how long each save stops the loop, and then waits for its end."""

    pacer: Pacer

    def save_checkpoint(self, again: bool = False) -> None:
        """Saves."""
        begin = time.perf_counter()
        super().save_checkpoint(again)
        stall = time.perf_counter() - begin
        self.sync()
        self.pacer.report_figure(stall)


def save(pacer: Pacer, folder: str, *, net: str, size: int) -> None:
    """Saves the state of a run in the background after each step."""
    TimedController.pacer = pacer
    trainer = {"checkpoint_interval": 1, "max_to_keep": 1}
    config = make_config(net, 1, {"size": size}, trainer)
    tk.launch(config, "train", f"{folder}/run", controller_cls=TimedController)


def make_config(
    net: str,
    loop: int,
    task: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
) -> tk.ExperimentConfig:
    """Returns the config of an endless run without checkpoints, with the given settings."""
    optimizer = {
        "optimizer": {"type": nets.optimizer_name(net)},
        "learning_rate": constant_rate(nets.LEARNING_RATE),
    }
    return tk.ExperimentConfig(task=BenchConfig()).replace(
        task={"net": net, **(task or {})},
        trainer={**build_endless_settings(loop), "optimizer_config": optimizer, **(trainer or {})},
        runtime=dict(runtime or {}),
    )


def build_endless_settings(loop: int) -> dict[str, int]:
    """Returns the settings of an endless run without checkpoints, for the section `trainer`."""
    return {"train_steps": ENDLESS, "steps_per_loop": loop, "checkpoint_interval": ENDLESS}


def constant_rate(value: float) -> dict[str, Any]:
    """Returns the setting of a constant learning rate."""
    return {"type": "constant", "constant": {"learning_rate": value}}
