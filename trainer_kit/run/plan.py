"""RunPlan: the mode, folder, config and options of a run, checked before anything is built."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.callbacks.callback import Callback
from trainer_kit.callbacks.configured_callbacks import check_callbacks, create_callbacks
from trainer_kit.config.fields import flatten_values
from trainer_kit.config.modes import Mode, lookup_mode
from trainer_kit.config.resume_check import Change
from trainer_kit.config.schema.evaluation import get_evaluation_name
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.layer import is_inside
from trainer_kit.errors import ConfigError, Mistake, UsageError
from trainer_kit.evals.checkpoint_selection import select_checkpoint
from trainer_kit.evals.continuous_eval import select_validation_sets
from trainer_kit.files import follow_links
from trainer_kit.process.run_directory import RunDirectory, check_model_dir
from trainer_kit.process.run_lock import RunLock, read_heartbeat
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.run.controller import Controller
from trainer_kit.run.lengths import resolve_lengths
from trainer_kit.run.orbit_adapters import list_actions
from trainer_kit.run.preflight import find_profile_mistakes
from trainer_kit.run.progress import Progress
from trainer_kit.runtime.collectives import (
    all_gather,
    barrier,
    is_chief,
    resolve_strategy,
    worker_count,
)
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.summary_manager import SummaryManagerLike
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.loops.intervals import Epochs
from trainer_kit.typing import Action, TaskLike

_LOG = logging.getLogger(__name__)

# The config values that may differ between workers.
_PER_WORKER_PATHS = ("runtime.task_index", "runtime.worker_hosts")

# A network file system may hide a new file as long as that.
_VISIBILITY_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class RunOptions:
    """The options of run_experiment, with the same names and meanings."""

    run_post_eval: bool = False
    save_summary: bool = True
    train_actions: Sequence[Action] | None = None
    eval_actions: Sequence[Action] | None = None
    trainer: BaseTrainer | None = None
    controller_cls: type[Any] = Controller
    summary_manager: SummaryManagerLike | None = None
    eval_summary_manager: SummaryManagerLike | None = None
    enable_async_checkpointing: bool = True
    callbacks: Sequence[Callback] | None = None
    checkpoint: str = "latest"
    eval_name: str = "continuous_eval"
    experiment: str = ""
    allow_config_change: Iterable[str] = ()
    from_step: int | None = None
    allow_partial_restore: bool = False
    records: Callable[[], Mapping[str, str]] = dict
    console: Writer | None = None
    profile: str | None = None


@dataclass(frozen=True)
class RunPlan:
    """A run that is checked and not yet built.

    Attributes:
      mode: The name of the mode.
      mode_properties: The properties of the mode.
      config: The experiment's config. In continuous_eval it has only the validation sets that the
        run evaluates. In modes that train, `resolve_lengths` has put steps in place of epochs and
        shares.
      options: The options of run_experiment.
      strategy: The strategy of the run.
      directory: The directory of the run.
      checkpoint: The path that mode eval evaluates. "" means the weights as the task initializes
        them.
      train_actions: The caller's actions after training loops, as a list.
      eval_actions: The caller's actions after evaluations, as a list.
      callbacks: The callbacks of the task if the run trains, those of the config, then the
        caller's.
      original_config: The config with its durations as they were written, for the run's records.
      changes: What differs from the config that the run in model_dir was started with.
      epochs: The epochs of the run. None if neither the config nor a callback names epochs.
    """

    mode: str
    mode_properties: Mode
    config: ExperimentConfig
    options: RunOptions
    strategy: tf.distribute.Strategy
    directory: RunDirectory
    checkpoint: str
    train_actions: Sequence[Action]
    eval_actions: Sequence[Action]
    callbacks: Sequence[Callback]
    original_config: ExperimentConfig
    changes: Sequence[Change] = ()
    epochs: Epochs | None = None

    @property
    def trains(self) -> bool:
        """Whether the run trains."""
        return self.mode_properties.trains

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates."""
        return self.mode_properties.evaluates or self.options.run_post_eval

    @property
    def last_step(self) -> int | None:
        """The step at which training ends, None if it continues until the data ends.

        Only for modes that train.
        """
        steps = self.config.trainer.train_steps
        return steps if steps >= 0 else None

    def is_complete(self, step: int) -> bool:
        """Whether a run that has reached `step` has nothing left to train."""
        return self.last_step is not None and step >= self.last_step

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files."""
        return is_chief(self.strategy)

    @property
    def writes_records(self) -> bool:
        """Whether this process writes params.yaml, manifest.json, metrics.jsonl and final.json."""
        return self.trains and self.is_chief

    def create_lock(self, progress: Progress) -> AbstractContextManager[Any]:
        """Returns the lock of this process.

        It makes this process the only trainer in model_dir, or the only sidecar of its name. The
        lock file is removed if the process ends before it has recorded a run or an evaluation.

        Raises:
          UsageError: for a sidecar with several workers, since each would choose its checkpoints by
            itself.
        """
        directory = self.directory
        if self.mode == "continuous_eval":
            if worker_count(self.strategy) > 1:
                raise UsageError(
                    "continuous_eval runs on one worker; start it without a cluster (TF_CONFIG,"
                    " worker_hosts)"
                )
            return Lease(
                directory.evals_dir,
                self.options.eval_name,
                progress.get_phase_and_step,
                record_path=directory.ledger_path,
            )
        if not self.is_chief or not self.trains:
            return contextlib.nullcontext()
        return RunLock(
            directory.path, progress.get_phase_and_step, record_path=directory.params_path
        )


def plan_run(
    strategy: tf.distribute.Strategy | None,
    mode: str,
    config: ExperimentConfig,
    model_dir: str,
    options: RunOptions,
) -> RunPlan:
    """Makes all checks that need no model, and returns the plan of the run.

    Changes no file.

    Raises:
      UsageError: for an unknown mode, a missing checkpoint, objects that are not actions or
        callbacks, or another backend of Keras.
      ConfigError: when the run in model_dir was started with another config, or the mode trains no
        steps to profile.
    """
    if keras.config.backend() != "tensorflow":
        raise UsageError(
            f"Keras runs on {keras.config.backend()}, but trainer_kit trains with TensorFlow; set"
            " KERAS_BACKEND=tensorflow before Keras is imported"
        )
    mode_properties = lookup_mode(mode)
    if not mode_properties.is_single_run:
        raise UsageError(
            f"mode {mode} needs a new task for each checkpoint: start it with"
            f" trainer_kit.launch(config, {mode!r}, model_dir) or with python -m trainer_kit.train"
        )
    if mistakes := find_profile_mistakes(options.profile, mode):
        raise ConfigError(mistakes)

    if mode == "continuous_eval":
        config = select_validation_sets(config)
    train_actions = list_actions("train_actions", options.train_actions)
    eval_actions = list_actions("eval_actions", options.eval_actions)
    directory = RunDirectory(
        follow_links(model_dir),
        config.trainer,
        sidecar=get_evaluation_name(mode, options.eval_name),
    )
    strategy = resolve_strategy(strategy)

    changes = list[Change]()
    if mode_properties.trains:
        changes = check_model_dir(
            directory, config, options.experiment, options.allow_config_change
        )
    for change in changes:
        _LOG.info("changed since the run was started: %s", change)

    checkpoint = options.checkpoint
    if mode == "eval":
        checkpoint = select_checkpoint(directory.path, checkpoint, directory.best_dir)
    configured_callbacks = create_callbacks(config.trainer.callbacks)
    given_callbacks = check_callbacks(options.callbacks)
    callbacks = [*configured_callbacks, *given_callbacks]
    return RunPlan(
        mode=mode,
        mode_properties=mode_properties,
        config=config,
        options=options,
        strategy=strategy,
        directory=directory,
        checkpoint=checkpoint,
        train_actions=train_actions,
        eval_actions=eval_actions,
        callbacks=callbacks,
        original_config=config,
        changes=changes,
    )


def resolve_plan(plan: RunPlan, task: TaskLike) -> RunPlan:
    """Returns the plan with what the task adds to it, unchanged if the run does not train.

    The callbacks of the task come before the others. Steps replace epochs and shares, whose length
    comes from the training data. Called in strategy scope.

    Raises:
      UsageError: when the task returns something else than trainer_kit.Callback objects.
      ConfigError: when the data does not indicate the length of an epoch, or a share has no run of
        known length.
    """
    if not plan.trains:
        return plan
    build_callbacks = getattr(task, "build_callbacks", list)
    callbacks = [*check_callbacks(list(build_callbacks())), *plan.callbacks]
    dataset = getattr(getattr(plan.options.trainer, "data", None), "prebuilt_dataset", None)
    config, epochs = resolve_lengths(plan.config, task, callbacks, dataset)
    return dataclasses.replace(plan, config=config, callbacks=callbacks, epochs=epochs)


def check_agreement(plan: RunPlan) -> None:
    """Checks that all workers have the same config and model_dir.

    Called on all of them, under the lock of the chief.

    Raises:
      UsageError: when values differ that `allow_config_change` does not name, or model_dir lacks
        the chief's heartbeat.
    """
    if worker_count(plan.strategy) == 1:
        return

    # Each worker sends its config values, and the heartbeat in its model_dir.
    folder = plan.directory.path
    exempt_paths = [
        path for path in (*_PER_WORKER_PATHS, *plan.options.allow_config_change) if path
    ]
    values = {
        path: repr(value)
        for path, value in flatten_values(plan.config).items()
        if not any(is_inside(path, section) for section in exempt_paths)
    }
    texts = all_gather(plan.strategy, json.dumps([values, read_heartbeat(folder)]))
    (chief_values, heartbeat), *others = map(json.loads, texts)

    advice = "start all workers with one config, or name the value in allow_config_change"
    mistakes: list[Mistake] = []
    for index, (worker_values, _) in enumerate(others, 1):
        for path in sorted(chief_values.keys() | worker_values.keys()):
            value = worker_values.get(path)
            chief_value = chief_values.get(path)
            if value != chief_value:
                problem = f"{value} on worker {index}, but {chief_value} on worker 0"
                mistakes.append(Mistake(path, problem, advice))
    if mistakes:
        # No worker ends before the others have the mistakes.
        barrier(plan.strategy)
        raise ConfigError(mistakes)

    # In a shared folder each worker reads the heartbeat of the chief.
    if not plan.trains:
        return
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS
    while True:
        current = read_heartbeat(folder)
        is_shared = current is not None and current["started"] == heartbeat["started"]
        if is_shared or time.monotonic() > deadline:
            break
        time.sleep(1)
    folders = all_gather(plan.strategy, "" if is_shared else folder)
    if other_folders := list(filter(None, folders)):
        barrier(plan.strategy)
        raise UsageError(
            f"model_dir: worker 0 trains in another folder than {other_folders[0]}; all need one"
            " shared folder"
        )
