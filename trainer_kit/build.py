"""The parts of a run, each made from the config: trainer, best checkpoint, checkpoint manager, reports."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.best import BestCheckpoint
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.schema import ExperimentConfig
from trainer_kit.run_directory import RunDirectory, config_hash
from trainer_kit.scalars import as_scalar
from trainer_kit.telemetry.background import BackgroundWriter
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.flops import count_flops
from trainer_kit.telemetry.history import JsonLinesWriter
from trainer_kit.telemetry.model_stats import count_parameters
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.tensorboard import SummaryManager, TensorBoardWriter
from trainer_kit.trainer import Trainer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reports:
    """Where a run's numbers go.

    Attributes:
      writer: takes a Report after each loop and evaluation; writes in a thread.
      train_summaries, eval_summaries: for TensorBoard, also for the task's own tf.summary calls.
      history: metrics.jsonl; None for runs that do not train.
    """

    writer: Writer
    train_summaries: Any
    eval_summaries: Any
    history: JsonLinesWriter | None


def create_trainer(
    config: ExperimentConfig, task: Any, train: bool = True, evaluate: bool = True, checkpoint_exporter: Any = None
) -> Trainer:
    """Returns a Trainer with the task's model and, to train, its optimizer. In strategy scope."""
    model = task.build_model()
    optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime) if train else None
    return Trainer(config, task, model, optimizer, train, evaluate, checkpoint_exporter=checkpoint_exporter)


def create_exporter(config: ExperimentConfig, folder: str, keeps: bool = True) -> BestCheckpoint | None:
    """Returns what keeps the best checkpoint in `folder`; None when the config names no metric."""
    metric, comparison = config.trainer.best_checkpoint_eval_metric, config.trainer.best_checkpoint_metric_comp
    return BestCheckpoint(folder, metric, comparison, keeps=keeps) if metric else None


def check_best_metric(trainer: Any, wanted: bool) -> None:
    """Checks, before the first step, that the best checkpoint will be kept if it is `wanted`; on every worker.

    Raises:
      UsageError: when no evaluation will report the metric, unless only a run can tell.
    """
    exporter = trainer.checkpoint_exporter
    if exporter is None:
        if wanted:
            _LOG.warning("no best checkpoint will be kept: the ready-made trainer has no checkpoint_exporter")
        return
    names = trainer.validation_metric_names()
    if names is not None:
        exporter.check_metric(names)


def create_manager(
    trainer: Trainer, config: ExperimentConfig, model_dir: str, chief: bool, asynchronous: bool
) -> CheckpointManager:
    """Returns the manager of the run's checkpoints."""
    return CheckpointManager(
        trainer.checkpoint,
        model_dir,
        max_to_keep=config.trainer.max_to_keep,
        step_counter=trainer.global_step,
        checkpoint_interval=config.trainer.checkpoint_interval,
        init_fn=trainer.initialize,
        asynchronous=asynchronous,
        for_training=trainer.optimizer is not None,
        keeps=chief,
    )


def summaries(folder: str, wanted: bool) -> SummaryManager:
    """Returns what writes TensorBoard summaries to `folder`, or to nothing."""
    return SummaryManager(folder if wanted else None)


def open_reports(
    directory: RunDirectory | None, *, trains: bool, console: Writer | None, train_summaries: Any, eval_summaries: Any
) -> Reports:
    """Opens all that a run reports to; without a directory, on a worker that is not the chief, next to nothing."""
    writers: list[Writer] = [TensorBoardWriter(train_summaries, eval_summaries)]
    history = JsonLinesWriter(directory.metrics) if directory is not None and trains else None
    if history is not None:
        writers.append(history)
    if directory is not None:
        writers.append(console or ConsoleWriter(sys.stdout))
    return Reports(BackgroundWriter(writers), train_summaries, eval_summaries, history)


def ledger(path: str, config: ExperimentConfig, dataset: str) -> Callable[..., None]:
    """Returns a function (step, logs, seconds, checkpoint) that appends an evaluation to the ledger at `path`."""
    digest = config_hash(config)

    def append(step: int, logs: Mapping[str, Any], seconds: float, checkpoint: str | None = None) -> None:
        record = {
            "step": step,
            "checkpoint": checkpoint,
            "dataset": dataset,
            "metrics": plain(logs),
            "seconds": round(seconds, 3),
            "config_hash": digest,
            "lineage": 0,
        }
        files.append_line(path, record)

    return append


def model_cost(trainer: Any) -> str:
    """Returns the size of the trainer's model and, once it was trained, what one example costs, for the log.

    Traces the model once more, so it comes last.
    """
    parameters, spec = str(count_parameters(trainer.model)), getattr(trainer, "batch_spec", None)
    if spec is None:
        return parameters
    features = spec[0] if isinstance(spec, tuple) and len(spec) == 2 else spec
    return f"{parameters}; {count_flops(trainer.model, features)} for one example"


def evaluated_step(path: str) -> int:
    """Returns the last step in the ledger at `path`; -1 if there is none. A torn line is skipped."""
    last = -1
    if os.path.exists(path):
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    last = max(last, int(json.loads(line)["step"]))
    return last


def plain(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs as JSON can hold them: nested dicts of floats; what is no single number is left out."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        kept = plain(value) if isinstance(value, Mapping) else as_scalar(value)
        if kept is not None:
            found[str(name)] = kept
    return found


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes the run's files."""
    return bool(strategy.extended.should_checkpoint)
