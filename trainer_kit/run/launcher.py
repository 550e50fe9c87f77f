"""Runs a config.

Sets devices, seeds and precision, makes strategy and task, and calls run_experiment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.config.modes import CONTINUOUS_FINETUNE, lookup_mode
from trainer_kit.config.run_length import find_length_mistakes
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.files import follow_links
from trainer_kit.process.run_directory import read_thread_counts
from trainer_kit.run.finetune import finetune_checkpoints
from trainer_kit.run.plan import RunOptions
from trainer_kit.run.run_limits import forbid_concurrent_runs
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.runtime.devices import configure_devices
from trainer_kit.runtime.global_batch import split_global_batch
from trainer_kit.runtime.lost_workers import convert_lost_worker_errors
from trainer_kit.runtime.precision import set_precision
from trainer_kit.runtime.strategy import create_strategy
from trainer_kit.runtime.tf_config import (
    configure_cluster,
    find_parameter_server_mistakes,
    read_cluster,
)
from trainer_kit.telemetry.run_log import collect_log


def launch(
    config: ExperimentConfig,
    mode: str,
    model_dir: str,
    *,
    before_task: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Runs `config` in a fresh process, or in one whose devices already match the config.

    Args:
      config: The experiment's config.
      mode: One of modes.MODES.
      model_dir: The folder of the run.
      before_task: Called after the task's module is imported and before the task is made.
      **options: Options of the run, which are keyword arguments of run_experiment.

    Returns:
      (model, logs), as run_experiment returns them.

    Raises:
      ConfigError: when a mode that trains has no step to train.
      UsageError: when the machine lacks what the runtime section asks for, or the replicas cannot
        share a batch equally.
      PreemptedError: when another worker of this run is gone.
    """
    run_options = RunOptions(**options)
    if lookup_mode(mode).trains and (mistakes := find_length_mistakes(config.trainer)):
        raise ConfigError(mistakes)
    model_dir = follow_links(model_dir)
    strategy_name = config.runtime.distribution_strategy
    if mode == "continuous_eval" and strategy_name in ("auto", "multi_worker_mirrored"):
        # A sidecar works alone, also with the params.yaml that a worker has written.
        config = config.replace(
            runtime={"distribution_strategy": "auto", "worker_hosts": None, "task_index": -1}
        )

    cluster = read_cluster()
    has_strategy = (
        lookup_mode(mode).trains or config.runtime.distribution_strategy == "multi_worker_mirrored"
    )
    if cluster and cluster.task_type not in ("chief", "worker") and has_strategy:
        raise UsageError(
            f"chief and workers train, but TF_CONFIG calls this process {cluster.task_type}; start"
            " an evaluator with mode continuous_eval, and no process for a ps"
        )

    task_type = lookup_task_class(config.task)
    before_task()

    # The log of a run has the lines of its preparation, too. Each fine-tuning has a log of its own.
    log: AbstractContextManager[Any] = contextlib.nullcontext()
    if mode != CONTINUOUS_FINETUNE:
        log = collect_log()
    with log:
        with forbid_concurrent_runs(), convert_lost_worker_errors():
            strategy = prepare_runtime(config, read_thread_counts(model_dir))

            def create_task(config: ExperimentConfig, model_dir: str) -> Any:
                with strategy.scope():
                    return task_type(config.task, logging_dir=model_dir)

            if mode == CONTINUOUS_FINETUNE:
                return finetune_checkpoints(strategy, create_task, config, model_dir, run_options)
            task = create_task(config, model_dir)
        return run_experiment(strategy, task, mode, config, model_dir, **vars(run_options))


def prepare_runtime(config: ExperimentConfig, threads: Mapping[str, int] | None = None) -> Any:
    """Configures devices, seeds and precision, and returns the strategy.

    Args:
      config: The experiment's config.
      threads: The thread counts that the run was started with. None for a new run.

    Raises:
      UsageError: when the machine lacks what the runtime section asks for, or the replicas cannot
        share a batch equally.
      StalledError: when another worker did not start within trainer.hang_timeout_seconds.
    """
    runtime = config.runtime
    if mistakes := find_parameter_server_mistakes(runtime):
        raise ConfigError(mistakes)
    configure_cluster(runtime.worker_hosts, runtime.task_index)
    configure_devices(runtime, threads)
    seed_everything(runtime.random_seed)
    set_precision(runtime)
    strategy = create_strategy(runtime, config.trainer.hang_timeout_seconds)
    for path, batch in config.get_training_batch_sizes():
        split_global_batch(batch, strategy.num_replicas_in_sync, path)
    return strategy
