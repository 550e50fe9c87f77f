"""Mode continuous_train_and_eval: fine-tunes and evaluates each new checkpoint of another run.

Each checkpoint gets a full run of train_and_eval in a separate folder, so that it can be killed at any moment and
resumes. The metrics of a step are written last, and the step is then done. If a fine-tuning finished but its metrics
are missing, the next start only writes them. The models of earlier steps are freed before the next fine-tuning begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoint_names import step_of
from trainer_kit.checkpoints.commit import problem
from trainer_kit.checkpoints.startup_scan import remove_saved
from trainer_kit.config.modes import CONTINUOUS_FINETUNE
from trainer_kit.config.schema.durations import unit_of
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.distribution.collectives import worker_count
from trainer_kit.distribution.fresh_process_state import forget_models
from trainer_kit.errors import (
    ConfigError,
    ModelDirInUseError,
    StorageError,
    UsageError,
)
from trainer_kit.evals.checkpoint_watcher import CheckpointWatcher
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.finetune_directory import FinetuneDirectory, pretraining_mistakes
from trainer_kit.process.run_directory import RunDirectory, check_model_dir, read_run_id, steps_of_run
from trainer_kit.process.run_lock import HEARTBEAT, RunLock, read_heartbeat
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.process.signals import StopSignals
from trainer_kit.run.final_record import recorded
from trainer_kit.run.runner import run_experiment
from trainer_kit.run.time_limit import TimeLimit
from trainer_kit.telemetry.tensorboard import SummaryManager

_LOG = logging.getLogger(__name__)
NewTask = Callable[[ExperimentConfig, str], Any]
_BETWEEN = "between two checkpoints; the same command continues with the next one"
_OF_ONE_RUN = ("trainer", "summary_manager", "eval_summary_manager", "from_step")


def finetune_checkpoints(
    strategy: tf.distribute.Strategy,
    new_task: NewTask,
    config: ExperimentConfig,
    model_dir: str,
    *,
    experiment: str = "",
    allow_config_change: Iterable[str] = (),
    records: Callable[[], Mapping[str, str]] = dict,
    **arguments: Any,
) -> tuple[Any, dict[str, Any]]:
    """Fine-tunes from each checkpoint in the folder `task.init_checkpoint`, until the run there is finished.

    Runs eagerly.

    Args:
      strategy: The strategy of all fine-tunings, with one worker.
      new_task: Takes a config and the folder of its run, and returns a new task.
      config: The config of the fine-tuning.
      model_dir: The folder for metrics-<step>.json and finetune-<step>/ of each step.
      experiment, allow_config_change, records: As in run_experiment.
      **arguments: Further arguments of run_experiment, used for each run.

    Returns:
      (model, metrics): the model fine-tuned last, None when nothing was left to train; the metrics of the last step.

    Raises:
      UsageError: when there are several workers, an argument belongs to a single run, or the config does not fit the
        fine-tunings in model_dir.
      NothingToWaitForError: when no checkpoint came in time although the other run was not finished.
      PreemptedError, InterruptedRunError: when SIGTERM or Ctrl-C stopped the fine-tunings.
    """
    _check_arguments(strategy, arguments)
    if mistakes := pretraining_mistakes(config, model_dir):
        raise ConfigError(mistakes)
    directory, allowed = RunDirectory(model_dir, config.trainer), tuple(allow_config_change)
    for change in check_model_dir(directory, config, experiment, allowed):
        _LOG.info("changed since the run was started: %s", change)
    own = {"experiment": experiment, "allow_config_change": allowed, "records": records, **arguments}
    signals = StopSignals(lambda: None, config.trainer.preemption_grace_seconds)
    with signals, contextlib.ExitStack() as run:
        run.enter_context(TimeLimit(config.trainer.max_time, signals))
        each = Finetuning(strategy, new_task, config, directory, own, signals)
        lock = run.enter_context(RunLock(model_dir, each.progress, recorded=directory.is_recorded))
        run.enter_context(recorded(directory, config, experiment, CONTINUOUS_FINETUNE, records()))
        assert isinstance(config.task.init_checkpoint, str), "pretraining_mistakes refuses a list"
        pretraining = Pretraining(config.task.init_checkpoint, model_dir, each, run)
        run.enter_context(contextlib.closing(each.curves))
        each.resume(pretraining)
        for path in _new_checkpoints(pretraining, config.trainer, signals, lock):
            each.fine_tune(step_of(path), path)
        signals.check(_BETWEEN)
        last = max(each.directory.done(), default=0)
        directory.write_final(last, CONTINUOUS_FINETUNE, each.directory.metrics(last), None)
        done = each.done_text()
        _LOG.info("finished: %s saves no more checkpoints; fine-tuned checkpoints: %s", pretraining.path, done)
        return each.model, each.directory.metrics(last)


class Pretraining(Sidecar):
    """The run whose checkpoints are fine-tuned, as CheckpointWatcher sees it.

    Args:
      folder: The folder of that run; it need not exist yet.
      model_dir: The folder of the fine-tunings.
      each: The fine-tunings.
      run: Holds the lease in `folder` once a heartbeat shows that trainer_kit runs there.
    """

    def __init__(self, folder: str, model_dir: str, each: Finetuning, run: contextlib.ExitStack) -> None:
        directory = RunDirectory(os.path.abspath(folder), TrainerConfig())
        name = f"finetune-{hashlib.sha256(os.path.realpath(model_dir).encode()).hexdigest()[:8]}"
        lease = Lease(directory.evals, name, each.progress, recorded=lambda: True)
        super().__init__(
            directory=directory,
            ledger=Ledger(directory.training_ledger, dataset="", config_hash=""),
            best=None,
            summaries=None,
            lease=lease,
            train_steps=-1,
            step=lambda: max(each.directory.done(), default=-1),
        )
        self.path, self._each, self._run = directory.path, each, run
        self._leased, self._refused = False, False

    def went_back_to(self) -> int | None:
        """Returns None, since finished fine-tunings stay; warns when the other run was rewound."""
        before = self._ledger.lineage
        self._ledger.lineage = max([before, *(item["lineage"] for item in self._ledger.records())])
        if self._ledger.lineage > before and (done := self._each.directory.done()):
            _LOG.warning(
                "%s has gone back to an earlier step; the finished fine-tunings stay (steps %s): to repeat one, remove "
                "its metrics-<step>.json and finetune-<step>/",
                *(self.path, ", ".join(map(str, sorted(done)))),
            )
        return None

    def evaluated(self) -> set[int]:
        """Returns the steps that are done."""
        return self._each.directory.done()

    def need(self, after: int | None, reads: int | None) -> None:
        """Writes a lease, so that the run keeps the checkpoints that are needed, if it reads leases."""
        if not self._leased and not self._refused and os.path.exists(os.path.join(self.path, HEARTBEAT)):
            try:
                self._run.enter_context(self._lease)
                self._leased = True
            except (StorageError, ModelDirInUseError) as error:
                self._refused = True
                _LOG.warning(
                    "no lease can be written in %s, so the training run there may remove checkpoints before they are "
                    "fine-tuned; increase its trainer.max_to_keep if that happens: %s",
                    *(self.path, error),
                )
        if self._leased:
            super().need(after, reads)


class Finetuning:
    """Runs the fine-tunings of a model_dir, one after the other.

    Args:
      strategy, new_task, config: As in `finetune_checkpoints`.
      directory: The run directory of model_dir.
      arguments: Arguments of run_experiment for each run.
      signals: The stop signals of the whole job; each run receives them too.

    Attributes:
      directory: The names and files of the fine-tunings.
      curves: The summary manager of the metrics, over the steps of the pretraining run.
      model: The model that was fine-tuned last; None at first.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        new_task: NewTask,
        config: ExperimentConfig,
        directory: RunDirectory,
        arguments: Mapping[str, Any],
        signals: StopSignals,
    ) -> None:
        self._strategy, self._new_task, self._config = strategy, new_task, config
        self._arguments, self._signals = arguments, signals
        self.directory = FinetuneDirectory(directory.path)
        self.curves = SummaryManager(directory.eval_summaries)
        self.model: Any = None
        self._step: int | None = None

    def progress(self) -> tuple[str, int]:
        """Returns (phase, steps taken in all fine-tunings), for the heartbeat; from any thread."""
        step = self._step
        known = self._config.trainer.train_steps
        before = len(self.directory.done() - {step}) * max(0 if unit_of(known) else known, 0)
        if step is None:
            return "wait", before
        now = read_heartbeat(self.directory.run(step)) or {"phase": "start", "step": 0}
        return f"finetune-{step}: {now['phase']}", before + int(now["step"])

    def resume(self, pretraining: Pretraining) -> None:
        """Finishes the fine-tunings that an earlier process began; their initial checkpoints may be gone by now."""
        for step in self.directory.done():
            self._remove_needless(step)
        newest_only = self._config.trainer.continuous_eval.policy == "latest"
        for step in self.directory.begun():
            pretraining.need(None if newest_only else step - 1, step)
            self.fine_tune(step, os.path.join(pretraining.path, f"ckpt-{step}"))

    def fine_tune(self, step: int, checkpoint: str) -> None:
        """Fine-tunes and evaluates one checkpoint, and writes its metrics; skips a damaged one with a warning.

        Raises:
          PreemptedError, InterruptedRunError: when a signal came before the fine-tuning, or stopped it.
        """
        self._signals.check(_BETWEEN)
        folder, config = self.directory.run(step), self._config.replace(task={"init_checkpoint": checkpoint})
        own = RunDirectory(folder, config.trainer)
        if not _has_ended(own.read_final(), steps_of_run(config.trainer.train_steps, folder)):
            if step not in self.directory.begun() and (wrong := problem(checkpoint)):
                _LOG.warning("a checkpoint is skipped: %s is damaged: %s", checkpoint, wrong)
                return
            self._train(step, folder, config)
        self._record(step, checkpoint, own.read_final() or {})
        self._step = None
        self._remove_needless(step)

    def _train(self, step: int, folder: str, config: ExperimentConfig) -> None:
        _LOG.info("fine-tuning %s in %s", config.task.init_checkpoint, folder)
        self.model, self._step = None, step  # frees the previous model before the next one is built
        forget_models(config.runtime)
        task = self._new_task(config, folder)
        self.model, _ = run_experiment(self._strategy, task, "train_and_eval", config, folder, **self._arguments)

    def done_text(self) -> str:
        """Returns the steps that are done, for messages."""
        return ", ".join(map(str, sorted(self.directory.done()))) or "none"

    def _record(self, step: int, checkpoint: str, final: Mapping[str, Any]) -> None:
        """Writes the curve and then the metrics, after which the step is done."""
        metrics = dict(final.get("metrics", {}))
        self.curves.resume(step - 1)  # a process that died here wrote it already
        self.curves.write_summaries(metrics, step)
        for later in sorted(other for other in self.directory.done() if other > step):
            self.curves.write_summaries(self.directory.metrics(later), later)
        self.curves.flush()
        record = {"step": step, "checkpoint": checkpoint, "metrics": metrics, "finetune_steps": final.get("step")}
        best = {"best": final["best"]} if "best" in final else {}
        self.directory.write_metrics(step, {**record, **best})

    def _remove_needless(self, step: int) -> None:
        """Removes the checkpoints that a finished run no longer needs; keeps the last one if there is no best one."""
        folder = self.directory.run(step)
        final = RunDirectory(folder, self._config.trainer).read_final()
        if final is not None:  # else it is no run of ours
            remove_saved(folder, keep=0 if "best" in final else 1, run_id=read_run_id(folder))


def _check_arguments(strategy: tf.distribute.Strategy, arguments: Mapping[str, Any]) -> None:
    if worker_count(strategy) > 1:
        raise UsageError(
            f"{CONTINUOUS_FINETUNE} runs on one worker; start it without a cluster (TF_CONFIG, worker_hosts)"
        )
    if refused := [name for name in _OF_ONE_RUN if arguments.get(name) is not None]:
        raise UsageError(
            f"{refused[0]} belongs to a single run, but {CONTINUOUS_FINETUNE} starts a run for each checkpoint; "
            "leave it out"
        )


def _has_ended(final: Mapping[str, Any] | None, train_steps: int) -> bool:
    """Whether a fine-tuning is finished. One that an action stopped is finished too, unlike a run of train_and_eval."""
    return final is not None and (bool(final.get("stopped")) or final["step"] >= train_steps)


def _new_checkpoints(
    pretraining: Pretraining, options: TrainerConfig, signals: StopSignals, lock: RunLock
) -> Iterator[str]:
    """Yields the prefix of each new checkpoint; ends as soon as a signal has arrived.

    Raises:
      StorageError: when model_dir was moved or removed meanwhile.
    """

    def stopping() -> bool:
        if lock.lost:
            raise StorageError(lock.lost)
        return signals.received is not None

    newest_only = options.continuous_eval.policy == "latest"
    watcher = CheckpointWatcher(pretraining.path, options.continuous_eval_timeout, pretraining, newest_only)
    return watcher.follow(stopping, contextlib.nullcontext)
