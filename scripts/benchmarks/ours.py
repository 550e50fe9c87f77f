"""trainer_kit as its users run it: a Task, a config, and run_experiment.

Each function is run by a process of its own, takes its turns from a Pacer, which is the last of the run's
train_actions, and never returns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import trainer_kit as tk
from scripts.benchmarks import nets, samples
from scripts.benchmarks.by_hand import Latest
from scripts.benchmarks.pacer import Pacer
from trainer_kit.run.launcher import prepare
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.report import Report

FOR_EVER = 10**9  # steps


@tk.configclass
class BenchConfig(tk.TaskConfig):
    """One of the nets.

    Attributes:
      net, size: See `nets.build`.
      metrics: The number of metrics.
      source: "pipeline", the tf.data pipeline of the hand-written loops, or "arrays", an ArraySource.
      examples: The number of validation examples.
      aggregates: Whether evaluations aggregate the labels of all examples.
      exposed: The number of tensors that the loss exposes: "logits_0" [batch, classes], and so on.
    """

    net: str = "dense"
    size: int = 0
    metrics: int = 1
    source: str = "pipeline"
    examples: int = samples.EXAMPLES
    aggregates: bool = False
    exposed: int = 0
    train_data: tk.DataConfig = tk.DataConfig(is_training=True, global_batch_size=samples.BATCH)
    validation_data: tk.DataConfig = tk.DataConfig(global_batch_size=samples.BATCH, drop_remainder=False)


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
            return tk.ArraySource(
                samples.arrays(config.net, samples.EXAMPLES if params.is_training else config.examples), params
            )
        if not params.is_training:
            return nets.one_pass(config.net, config.examples)
        batch = params.global_batch_size
        return nets.pipeline(config.net, input_context.get_per_replica_batch_size(batch) if input_context else batch)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy."""
        for number in range(self.task_config.exposed):
            tk.expose(f"logits_{number}", model_outputs * float(number + 2))
        return nets.loss(keras, labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the accuracies."""
        return nets.accuracies(keras, self.task_config.metrics)

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        """Evaluates a batch."""
        logs: dict[str, Any] = super().validation_step(inputs, model, metrics)
        return {**logs, "labels": inputs[1]} if self.task_config.aggregates else logs


class AggregatingTask(BenchTask):
    """Task that also counts the labels."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        """Returns the number of examples of each class so far."""
        counts = tf.math.bincount(step_logs["labels"][0], minlength=samples.CLASSES, maxlength=samples.CLASSES)
        return counts if state is None else state + counts


class Silent:
    """A console that shows nothing."""

    def write(self, report: Report) -> None:
        """Ignores a report."""

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def train(
    pacer: Pacer,
    folder: str,
    *,
    net: str,
    loop: int,
    task: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
    bare: bool = False,
    actions: int = 0,
) -> None:
    """Trains in loops of `loop` steps with default settings, and without a checkpoint.

    Args:
      pacer: The pacer that assigns the turns.
      folder: The parent folder of model_dir.
      net: A net of `nets`.
      loop: The steps of a loop.
      task, trainer, runtime: Further settings in these sections.
      bare: Whether to switch off summaries and progress.
      actions: The number of train_actions in addition to the pacer.
    """
    config = config_of(net, loop, task or {}, trainer or {}, runtime or {})
    quiet: dict[str, Any] = {"save_summary": False, "console": Silent()} if bare else {}
    after = [*(Latest() for _ in range(actions)), lambda logs: pacer.done(loop)]
    tk.launch(config, "train", f"{folder}/run", train_actions=after, **quiet)


class TimedTrainer(tk.Trainer):
    """Trainer whose evaluations are left out of the measured time."""

    pacer: Pacer

    def evaluate(self, num_steps: Any, *arguments: Any, **keywords: Any) -> Any:
        """Evaluates."""
        begin = time.perf_counter()
        logs = super().evaluate(num_steps, *arguments, **keywords)
        self.pacer.leave_out(time.perf_counter() - begin)
        return logs


def train_with_everything(
    pacer: Pacer, folder: str, *, net: str, loop: int, checkpoint_interval: int, task: Mapping[str, Any] | None = None
) -> None:
    """Trains with checkpoints, summaries, progress, ten train_actions, and an evaluation after ten checkpoints.

    The evaluations do not count; whatever training waits for before and after them does.
    """
    intervals = {"checkpoint_interval": checkpoint_interval, "validation_interval": 10 * checkpoint_interval}
    config = config_of(net, loop, task or {}, {**intervals, "summary_interval": loop}, {})
    strategy = prepare(config)
    with strategy.scope():
        bench = BenchTask(config.task)
        optimizer = bench.create_optimizer(config.trainer.optimizer_config, config.runtime)
        trainer = TimedTrainer(config, bench, bench.build_model(), optimizer)
    trainer.pacer = pacer
    tk.run_experiment(
        strategy,
        bench,
        "train_and_eval",
        config,
        f"{folder}/run",
        trainer=trainer,
        train_actions=[*(Latest() for _ in range(10)), lambda logs: pacer.done(loop)],
        console=ConsoleWriter(sys.stdout, interactive=True),
    )


def evaluate(
    pacer: Pacer,
    folder: str,
    *,
    net: str,
    examples: int,
    source: str = "pipeline",
    aggregates: bool = False,
    trainer: Mapping[str, Any] | None = None,
) -> None:
    """Evaluates all of the data repeatedly with Trainer.evaluate."""
    del folder
    options = {"examples": examples, "source": source, "aggregates": aggregates}
    config = config_of(net, 1, options, trainer or {}, {})
    with prepare(config).scope():
        task = (AggregatingTask if aggregates else BenchTask)(config.task)
        evaluator = tk.Trainer(config, task, task.build_model(), None, train=False)
    steps = tf.constant(-1)
    while True:
        evaluator.evaluate(steps)
        pacer.done(-(-examples // samples.BATCH))


def config_of(
    net: str, loop: int, task: Mapping[str, Any], trainer: Mapping[str, Any], runtime: Mapping[str, Any]
) -> tk.ExperimentConfig:
    """Returns the config of an endless run without checkpoints, with the given settings."""
    learning_rate = {"type": "constant", "constant": {"learning_rate": samples.RATE}}
    steps = {"train_steps": FOR_EVER, "steps_per_loop": loop, "checkpoint_interval": FOR_EVER}
    optimization = {"optimizer": {"type": samples.optimizer_name(net)}, "learning_rate": learning_rate}
    return tk.ExperimentConfig(task=BenchConfig()).replace(
        task={"net": net, **task}, trainer={**steps, "optimizer_config": optimization, **trainer}, runtime=dict(runtime)
    )
