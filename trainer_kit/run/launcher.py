"""From a config to a finished run: devices, seeds, precision, strategy, task, run_experiment, in this order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from trainer_kit.config.experiments import task_class
from trainer_kit.config.modes import CONTINUOUS_FINETUNE
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.distribution.devices import configure_devices
from trainer_kit.distribution.global_batch import check_global_batch
from trainer_kit.distribution.lost_workers import peers_needed
from trainer_kit.distribution.precision import set_precision
from trainer_kit.distribution.seeds import seed_everything
from trainer_kit.distribution.strategy import create_strategy
from trainer_kit.distribution.tf_config import configure_cluster, parameter_server_mistakes
from trainer_kit.errors import ConfigError
from trainer_kit.files import follow_links
from trainer_kit.process.run_directory import kept_threads
from trainer_kit.run.finetune import finetune_checkpoints
from trainer_kit.run.runner import run_experiment


def launch(
    config: ExperimentConfig,
    mode: str,
    model_dir: str,
    *,
    before_task: Callable[[], None] = lambda: None,
    **arguments: Any,
) -> tuple[Any, dict[str, Any]]:
    """Runs `config` in a fresh process, or one whose devices are as the config has them.

    Args:
      config: of the experiment.
      mode: one of modes.MODES.
      model_dir: folder of the run.
      before_task: called when the task's module has been imported, before the task is made.
      **arguments: keyword arguments of run_experiment.

    Returns:
      (model, logs) as run_experiment does.

    Raises:
      UsageError: when the machine is not what the runtime section asks for, or a batch does not divide.
      PreemptedError: when a worker that this one trains with is gone.
    """
    model_dir = follow_links(model_dir)
    task_type = task_class(config.task)
    before_task()
    with peers_needed():
        strategy = prepare(config, kept_threads(model_dir))
        new_task = functools.partial(_new_task, task_type, strategy)
        if mode == CONTINUOUS_FINETUNE:
            return finetune_checkpoints(strategy, new_task, config, model_dir, **arguments)
        task = new_task(config, model_dir)
    return run_experiment(strategy, task, mode, config, model_dir, **arguments)


def _new_task(task_type: Any, strategy: Any, config: ExperimentConfig, model_dir: str) -> Any:
    with strategy.scope():
        return task_type(config.task, logging_dir=model_dir)


def prepare(config: ExperimentConfig, threads: Mapping[str, int] | None = None) -> Any:
    """Configures devices, seeds and precision, and returns the strategy.

    Args:
      config: of the experiment.
      threads: thread counts that the run was started with, if it was.

    Raises:
      UsageError: when the machine is not what the runtime section asks for, or a batch does not divide.
      StalledError: when another worker has not come within trainer.hang_timeout_seconds.
    """
    runtime = config.runtime
    if mistakes := parameter_server_mistakes(runtime):
        raise ConfigError(mistakes)
    configure_cluster(runtime.worker_hosts, runtime.task_index)
    configure_devices(runtime, threads)
    seed_everything(runtime.random_seed)
    set_precision(runtime)
    strategy = create_strategy(runtime, config.trainer.hang_timeout_seconds)
    for path, batch in config.equal_batches():
        check_global_batch(batch, strategy.num_replicas_in_sync, path)
    return strategy
