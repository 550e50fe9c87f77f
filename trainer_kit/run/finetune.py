"""Mode continuous_train_and_eval: fine-tunes and evaluates each new checkpoint of another run.

Each checkpoint gets a full run of train_and_eval in a separate folder, so that it can be killed at
any moment and resumes. The metrics of a step are written last, and the step is then finished. The
model of a step is freed before the next fine-tuning begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import parse_step
from trainer_kit.checkpoints.retention import remove_old_checkpoints
from trainer_kit.config.modes import CONTINUOUS_FINETUNE
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.evals.checkpoint_watcher import CheckpointWatcher
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process import finetune_directory
from trainer_kit.process.run_directory import RunDirectory, check_model_dir, read_run_id
from trainer_kit.process.run_lock import HEARTBEAT, RunLock
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.process.signals import StopSignals
from trainer_kit.run.plan import RunOptions
from trainer_kit.run.run_limits import TimeLimit
from trainer_kit.run.run_record import record_run
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.collectives import worker_count
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.runtime.precision import set_precision
from trainer_kit.telemetry.summary_manager import SummaryManager
from trainer_kit.typing import TaskLike

_LOG = logging.getLogger(__name__)
_STOP_PLACE = "between two checkpoints; the same command continues with the next one"


def finetune_checkpoints(
    strategy: tf.distribute.Strategy,
    create_task: Callable[[ExperimentConfig, str], TaskLike],
    config: ExperimentConfig,
    model_dir: str,
    options: RunOptions,
) -> tuple[Any, dict[str, Any]]:
    """Fine-tunes from each checkpoint in the folder `task.init_checkpoint`.

    Returns when the run there is finished. Runs eagerly.

    Args:
      strategy: The strategy of all fine-tunings, with one worker.
      create_task: Takes a config and the folder of its run, and returns a new task.
      config: The config of the fine-tuning.
      model_dir: The folder for metrics-<step>.json and finetune-<step>/ of each step.
      options: The options of each run.

    Returns:
      (model, metrics): the model fine-tuned last, None when nothing was left to train, and the
      metrics of the last step.

    Raises:
      UsageError: when there are several workers, or the config does not fit the fine-tunings in
        model_dir.
      NothingToWaitForError: when no checkpoint came in time although the other run was not
        finished.
      PreemptedError, InterruptedRunError: when SIGTERM or Ctrl-C stopped the fine-tunings.
    """
    if worker_count(strategy) > 1:
        raise UsageError(
            f"{CONTINUOUS_FINETUNE} runs on one worker; start it without TF_CONFIG and worker_hosts"
        )
    if mistakes := finetune_directory.find_pretraining_mistakes(config, model_dir):
        raise ConfigError(mistakes)
    directory = RunDirectory(model_dir, config.trainer)
    check_model_dir(directory, config, options.experiment, options.allow_config_change)
    signals = StopSignals(grace_seconds=config.trainer.preemption_grace_seconds)

    with signals, TimeLimit(config.trainer.max_time, signals), contextlib.ExitStack() as run:
        pretraining = Pretraining(str(config.task.init_checkpoint), model_dir, run)
        lock = RunLock(model_dir, pretraining.get_phase_and_step, record_path=directory.params_path)
        run.enter_context(lock)
        record = record_run(
            directory, config, options.experiment, CONTINUOUS_FINETUNE, options.records()
        )
        run.enter_context(record)
        curves = run.enter_context(contextlib.closing(SummaryManager(directory.eval_summary_dir)))

        model = None
        for step, checkpoint in pretraining.follow_checkpoints(config.trainer, signals):
            signals.check_not_stopped(_STOP_PLACE)
            folder = finetune_directory.get_finetune_dir(model_dir, step)
            _LOG.info("fine-tuning %s in %s", checkpoint, folder)

            # This frees the model before the next one is built.
            model = None
            forget_models(config.runtime)
            step_config = config.replace(task={"init_checkpoint": checkpoint})
            task = create_task(step_config, folder)
            model, _ = run_experiment(
                strategy, task, "train_and_eval", step_config, folder, **vars(options)
            )

            final = RunDirectory(folder, config.trainer).read_final() or {}
            metrics = final.get("metrics", {})
            curves.write_summaries(metrics, step)
            curves.flush()

            # The metrics are written last: then the step is finished.
            step_record = {
                "step": step,
                "checkpoint": checkpoint,
                "metrics": metrics,
                "finetune_steps": final.get("step"),
                "best": final.get("best"),
            }
            metrics_path = finetune_directory.get_metrics_path(model_dir, step)
            files.write_json(metrics_path, step_record, point="metrics")
            kept_count = 0 if "best" in final else 1
            remove_old_checkpoints(folder, keep=kept_count, run_id=read_run_id(folder))

        signals.check_not_stopped(_STOP_PLACE)
        last_step = max(finetune_directory.list_finished_steps(model_dir), default=0)
        last_path = finetune_directory.get_metrics_path(model_dir, last_step)
        last_metrics = (files.read_json(last_path) or {}).get("metrics", {})
        directory.write_final(last_step, CONTINUOUS_FINETUNE, last_metrics, None)
        return model, last_metrics


class Pretraining(Sidecar):
    """The run whose checkpoints are fine-tuned, as CheckpointWatcher sees it.

    Args:
      folder: The folder of that run. It need not exist yet.
      model_dir: The folder of the fine-tunings.
      exit_stack: Gets the lease in `folder`, once a heartbeat shows that trainer_kit runs there.
    """

    def __init__(self, folder: str, model_dir: str, exit_stack: contextlib.ExitStack) -> None:
        directory = RunDirectory(os.path.abspath(folder), TrainerConfig())
        # Each folder of fine-tunings has a separate lease.
        digest = hashlib.sha256(os.path.realpath(model_dir).encode()).hexdigest()
        name = f"finetune-{digest[:8]}"
        super().__init__(
            directory=directory,
            ledger=Ledger(directory.training_ledger_path, dataset="", config_hash=""),
            best=None,
            summaries=None,
            lease=Lease(directory.evals_dir, name, self.get_phase_and_step),
            train_steps=-1,
        )
        self._path = directory.path
        self._model_dir = model_dir
        self._exit_stack = exit_stack
        self._has_lease = False

    def get_reached_step(self) -> int:
        """Returns the last step whose fine-tuning is finished, -1 before the first."""
        return max(self.get_evaluated_steps(), default=-1)

    def follow_checkpoints(
        self, options: TrainerConfig, signals: StopSignals
    ) -> Iterator[tuple[int, str]]:
        """Yields the step and the prefix of each checkpoint to fine-tune, until a signal.

        Interrupted fine-tunings come first.
        """
        newest_only = options.continuous_eval.policy == "latest"
        for step in finetune_directory.list_unfinished_steps(self._model_dir):
            # The checkpoint may be gone by now: the interrupted run has saved its own.
            self.protect_checkpoints(None if newest_only else step - 1, step)
            yield step, os.path.join(self._path, f"ckpt-{step}")

        watcher = CheckpointWatcher(self._path, options.continuous_eval_timeout, self, newest_only)
        for prefix in watcher.follow(signals.is_stop_requested, contextlib.nullcontext):
            yield parse_step(prefix), prefix

    def get_phase_and_step(self) -> tuple[str, int]:
        """Returns (phase, last finished step), for the heartbeat. Callable from any thread."""
        return "fine-tune", max(self.get_evaluated_steps(), default=0)

    def poll_rewind(self) -> int | None:
        """Returns None: finished fine-tunings stay when the other run is rewound."""
        return None

    def get_evaluated_steps(self) -> set[int]:
        """Returns the steps that are finished."""
        return set(finetune_directory.list_finished_steps(self._model_dir))

    def protect_checkpoints(self, after_step: int | None, reading_step: int | None) -> None:
        """Writes a lease, so that the run keeps the checkpoints that are needed.

        Does so only once a heartbeat shows that the run reads leases.
        """
        if not self._has_lease:
            heartbeat_path = os.path.join(self._path, HEARTBEAT)
            if os.access(heartbeat_path, os.W_OK):
                self._exit_stack.enter_context(self._lease)
                self._has_lease = True
        if self._has_lease:
            super().protect_checkpoints(after_step, reading_step)


def forget_models(runtime: RuntimeConfig) -> None:
    """Frees the state that Keras keeps of earlier models, and seeds everything.

    What is built next has the names, draws the random numbers and has the dtype policy that it
    would have in a new process, whatever was built before. Runs eagerly, on the host.
    """
    # The user's own policy stays if the config has none.
    policy = keras.config.dtype_policy()
    keras_2 = sys.modules.get("tf_keras")
    if keras_2 is not None:
        keras_2.backend.clear_session()
    keras.utils.clear_session()
    keras.config.set_dtype_policy(policy)
    seed_everything(runtime.random_seed)
    set_precision(runtime)
