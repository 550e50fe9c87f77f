"""Records a run: its config before the first step, and its final metrics at the end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import tensorflow as tf
from pydantic import JsonValue

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import PreemptedError, find_trainer_kit_error
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.ledger import extract_scalars
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.signals import StopSignals
from trainer_kit.run.controller import Controller
from trainer_kit.run.orbit_adapters import OrbitController
from trainer_kit.run.plan import RunPlan
from trainer_kit.run.progress import REPORT_PHASE
from trainer_kit.runtime.collectives import all_gather
from trainer_kit.runtime.devices import get_thread_counts, has_only_cpus
from trainer_kit.telemetry.flops import describe_model_cost
from trainer_kit.telemetry.goodput import read_goodput
from trainer_kit.telemetry.report_lines import format_best
from trainer_kit.telemetry.report_writers import ReportWriters
from trainer_kit.telemetry.time_advice import RunSettings, advise_on_time
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.checks.model_and_config import find_single_thread_problem
from trainer_kit.training.loops.iterators import is_stopping

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def record_run(
    directory: RunDirectory,
    config: ExperimentConfig,
    experiment: str,
    mode: str,
    extra_files: Mapping[str, str],
    global_step: tf.Variable | None = None,
    setup: Mapping[str, JsonValue] | None = None,
) -> Iterator[None]:
    """Writes the record of a run before its first step.

    Removes it when an explained error comes before that step.

    Args:
      directory: The directory of the run.
      config, experiment, mode, extra_files, setup: The record. See RunDirectory.write_record.
      global_step: The variable of the global step, a scalar. Once it is above 0 the record stays.
        None means that any explained error removes the record.
    """
    missing_paths = directory.list_missing_records(extra_files)
    try:
        directory.write_record(config, experiment, mode, extra_files, get_thread_counts(), setup)
        yield
    except Exception as error:
        if find_trainer_kit_error(error):
            has_trained = global_step is not None and int(global_step.numpy()) != 0
            if not has_trained:
                directory.remove_records(missing_paths)
        raise


@dataclass(frozen=True)
class FinishedRun:
    """A run that an earlier start has finished.

    Attributes:
      logs: Its final metrics. Empty if none are wanted.
      advice: How it has ended, and what to change to continue it.
    """

    logs: dict[str, Any]
    advice: str


def find_finished_run(
    plan: RunPlan, final: Mapping[str, Any], stop_reason: str
) -> FinishedRun | None:
    """Returns the finished run, None if there are steps to train or metrics to compute.

    Args:
      plan: The plan of this start.
      final: The final record of an earlier start that ended at the step of the newest checkpoint.
      stop_reason: Why early stopping ends the run at this step. "" if it does not. A run that only
        an action stopped is not finished.
    """
    if not plan.trains or (plan.evaluates and not final["metrics"]):
        return None

    step = final["step"]
    if final.get("stopped") and not plan.is_complete(step):
        if not stop_reason:
            return None
        ending = f"stopped early at step {step}: {stop_reason}"
        change = "trainer.early_stopping.patience, or remove trainer.early_stopping,"
    else:
        if plan.last_step is not None and step < plan.last_step:
            return None
        ending = f"finished at step {step}"
        change = "trainer.train_steps"

    logs = dict(final["metrics"]) if plan.evaluates else {}
    advice = f"{plan.directory.path} was {ending}; raise {change} to continue the training"
    return FinishedRun(logs, advice)


def finish_run(
    plan: RunPlan,
    controller: Controller | OrbitController,
    signals: StopSignals,
    writers: ReportWriters,
    best: BestCheckpoints | None,
    logs: Mapping[str, Any],
) -> None:
    """Writes final.json once all checkpoints and reports of a training run are in its files.

    Logs the time account of this process and the callbacks that failed, also after a stop.

    Args:
      plan: The plan of the run.
      controller: Its controller.
      signals: Its stop signals.
      writers: Its report writers.
      best: The owner of its best checkpoints. None if it keeps none.
      logs: The logs of its last evaluation.

    Raises:
      PreemptedError, InterruptedRunError: when the run was stopped before its end.
      StorageError: when the last checkpoint or final.json cannot be written.
    """
    trainer = controller.run.trainer
    for name, count in controller.callbacks.errors.items():
        plural = "s" if count > 1 else ""
        _LOG.warning("the callback %s failed %d time%s; the run continued", name, count, plural)

    if was_stopped(signals, trainer):
        if plan.writes_records:
            _, lines = _account_for_time(plan, trainer, controller.times)
            for line in lines:
                _LOG.info("%s", line)
        reasons = [signals.reason]
        if plan.config.trainer.max_time is not None:
            # The time limit ends all workers, whichever has noticed first.
            reasons = all_gather(trainer.strategy, signals.reason)

        step = controller.run.read_step()
        where = f"at step {step}; the same command resumes from the last checkpoint"
        if reason := max(reasons):
            raise PreemptedError(f"stopped by {reason} {where}")
        signals.check_not_stopped(where)
        if trainer.seconds_since_stop_request > 0:
            # This process was asked to stop, and not by a signal.
            raise PreemptedError(f"stopped by trainer.request_stop() {where}")
        raise PreemptedError(f"another worker was asked to stop; this one stopped {where}")

    if plan.mode == "continuous_eval":
        best_value = best.best if best is not None else None
        ending = format_best(best_value) if best_value else "it keeps no best"
        _LOG.info("continuous_eval finished; %s", ending)

    with controller.times.during("save"):
        controller.sync()
    if not plan.writes_records:
        return
    with controller.times.during(REPORT_PHASE):
        writers.writer.flush()
        step = controller.run.step
        cost = describe_model_cost(trainer)

    account, lines = _account_for_time(plan, trainer, controller.times)
    reason = "" if plan.is_complete(step) else controller.run.stop_reason
    metrics = extract_scalars(logs)
    record = plan.directory.write_final(step, plan.mode, metrics, best, reason, account)
    ending = f"finished at step {step}"
    if reason:
        ending = f"stopped early at step {step}: {reason}"
    goodput = read_goodput(plan.directory.path, datetime.now(UTC))
    if goodput is not None and goodput.attempts > 1:
        lines.append(str(goodput))
    for line in (f"{ending}; {cost}", *lines):
        _LOG.info("%s", line)
    controller.callbacks.call("run_finished", record)


def was_stopped(signals: StopSignals, trainer: BaseTrainer) -> bool:
    """Whether the run was stopped early. Several workers stop together or finish together."""
    return is_stopping(trainer, signals.is_stop_requested)


def _account_for_time(
    plan: RunPlan, trainer: BaseTrainer, ledger: TimeLedger
) -> tuple[dict[str, Any], list[str]]:
    """Returns the time account of this process, for final.json and as lines.

    Both are empty if no step was trained.
    """
    times = ledger.build_account()
    if not times.steps:
        return {}, []

    config = plan.config
    options = config.trainer
    compile_settings = {
        "trainer.train_tf_function=true": options.train_tf_function,
        "trainer.train_tf_while_loop=true": options.train_tf_while_loop,
        "runtime.run_eagerly=false": not config.runtime.run_eagerly,
    }
    unset_settings = []
    for setting, is_set in compile_settings.items():
        if not is_set:
            unset_settings.append(setting)
    can_fuse = options.fuse_steps == 1 and not trainer.find_fusing_problem()
    can_use_one_thread = config.runtime.executor == "default" and not find_single_thread_problem(
        trainer.strategy
    )
    settings = RunSettings(
        steps_per_loop=options.steps_per_loop,
        to_compile=tuple(unset_settings),
        is_fused=trainer.fuse_steps > 1,
        can_fuse=can_fuse,
        can_use_one_thread=can_use_one_thread,
        is_on_cpu=has_only_cpus(),
    )
    advice = advise_on_time(times, settings)
    record = {**times.to_record(), "verdict": advice}
    return record, [f"time of this process: {times.format_shares()}", advice]
