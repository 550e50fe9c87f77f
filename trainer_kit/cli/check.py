"""Checks an experiment: builds it, runs a training and an evaluation step, saves, restores; leaves no files."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_arguments
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.gin_source import gin_second_pass
from trainer_kit.errors import DivergedError, ExitCode
from trainer_kit.process.gc_freeze import gc_frozen
from trainer_kit.training.losses import reported_loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment and the sources of its config."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs every check and prints a line for each; the first failing check ends the command with its message."""
    start = time.perf_counter()
    with _checking("config: every value is known and valid"):
        config = resolve_arguments(arguments).config
    with _checking("task: its module can be imported, and gin knows every name that is bound"):
        from trainer_kit.config.experiments import task_class

        with gc_frozen():
            task_type = task_class(config.task)
        gin_second_pass(arguments.gin_file, arguments.gin_params)
    with _checking("machine: the devices and the strategy can be used, and the batch sizes divide among the replicas"):
        with gc_frozen():
            from trainer_kit.run.launcher import prepare
        strategy = prepare(config)
    with strategy.scope(), tempfile.TemporaryDirectory() as folder:
        _check_run(config, task_type, folder)
    print(f"{arguments.experiment} is ready to run ({time.perf_counter() - start:.1f} s)")
    return ExitCode.DONE


def _check_run(config: ExperimentConfig, task_type: Any, folder: str) -> None:
    import tensorflow as tf

    from trainer_kit.callbacks.base import Run
    from trainer_kit.callbacks.callback_list import CallbackList
    from trainer_kit.callbacks.configured_callbacks import from_config
    from trainer_kit.callbacks.early_stopping import check_early_stopping_metric
    from trainer_kit.checkpoints.state.strict_restore import restore
    from trainer_kit.process.run_directory import RunDirectory
    from trainer_kit.telemetry.flops import model_cost
    from trainer_kit.training.trainer_creation import create_exporter, create_trainer

    with _checking("model, optimizer and metrics can be built"):
        exporter = create_exporter(config, RunDirectory(folder, config.trainer))
        task = task_type(config.task, logging_dir=folder)
        trainer = create_trainer(config, task, checkpoint_exporter=exporter)
    names = trainer.validation_metric_names()
    if exporter is not None and names is not None:
        with _checking(f"best metric: {', '.join(exporter.metric_names)} is one of {', '.join(names)}"):
            exporter.check_metric(names)
    early = config.trainer.early_stopping
    if early is not None and not early.eval_name and names is not None:
        with _checking(f"early stopping: {early.metric} is one of {', '.join(names)}"):
            check_early_stopping_metric(early, trainer)
    if config.trainer.callbacks:
        with _checking("callbacks: all can be created"):
            CallbackList(Run(trainer), from_config(config.trainer.callbacks))
    with _checking("data: can be opened, and is not empty"):
        trainer.check_data()
    with _checking("train: one step on one batch"):
        logs = trainer.train(tf.constant(1))
        print(f"      training_loss {reported_loss(logs):.4g}; {model_cost(trainer)}")
        if not math.isfinite(reported_loss(logs)):
            raise DivergedError("the loss of the first step is not finite; look at the data and at build_losses")
    with _checking("evaluate: one batch"):  # the exporter refuses logs without its metric
        trainer.evaluate(tf.constant(1))
    with _checking("checkpoint: what was saved can be restored"):
        path = trainer.checkpoint.save(f"{folder}/ckpt")
        restore(trainer.checkpoint, path, whole=True, loose=trainer.state.loose)


@contextmanager
def _checking(what: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    except BaseException:
        print(f"FAIL  {what}", flush=True)
        raise
    print(f"ok    {what} ({time.perf_counter() - start:.1f} s)", flush=True)
