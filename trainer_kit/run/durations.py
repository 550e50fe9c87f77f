"""Puts steps in place of the epochs and shares in the config of a training run, before its trainer is built."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.base import Callback
from trainer_kit.callbacks.epoch_events import NAMES
from trainer_kit.checkpoints.retention import kept_by_steps, kept_by_time
from trainer_kit.config.fields import leaves
from trainer_kit.config.run_length import Interval, RunLength, durations_in, with_steps
from trainer_kit.config.schema.durations import EPOCHS, SHARE, seconds_of, unit_of
from trainer_kit.config.schema.evaluation import validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.distribution.collectives import broadcast_from_chief, worker_count, worker_index
from trainer_kit.inputs.epoch_length import epoch_length
from trainer_kit.inputs.registered_datasets import inputs_of
from trainer_kit.inputs.sources.base import made_inputs
from trainer_kit.process.run_directory import steps_of_run
from trainer_kit.run.goal import ExactIntervals
from trainer_kit.run.plan import RunPlan
from trainer_kit.training.loops.epochs import Epochs
from trainer_kit.training.loops.summary_condition import SummaryTimer
from trainer_kit.training.trainer_creation import create_trainer

_LOG = logging.getLogger(__name__)


def with_durations(plan: RunPlan, task: Any) -> RunPlan:
    """Returns the plan with steps in its config, and with the epochs of the run; unchanged if it does not train.

    Runs eagerly, in the scope of the strategy, on every worker.

    Raises:
      ConfigError: when the data does not tell the length of an epoch, or a share has no run of known length.
    """
    if not plan.trains:
        return plan
    feed = getattr(getattr(plan.options.trainer, "data", None), "feed", None)
    config, epochs = in_steps(plan.config, task, plan.callbacks, getattr(feed, "given", None))
    _log_moved(plan, config, epochs)
    return dataclasses.replace(plan, config=config, epochs=epochs)


def _log_moved(plan: RunPlan, config: ExperimentConfig, epochs: Epochs | None) -> None:
    """Logs the durations that are other steps than before, because the run or its epochs have another length now."""
    old = {change.path.removeprefix("trainer."): change.old for change in plan.changes}
    lengths = {name: old[name] for name in ("train_steps", "steps_per_epoch") if isinstance(old.get(name), int | str)}
    if "train_steps" in lengths:
        lengths["train_steps"] = steps_of_run(lengths["train_steps"], plan.directory.path)
    if not lengths or lengths.get("train_steps", 1) <= 0:
        return
    steps = lengths.get("steps_per_epoch") or (epochs.steps if epochs else None)
    before = leaves(with_steps(plan.written.replace(trainer=lengths), Fraction(steps) if steps else None).trainer)
    written, now = leaves(plan.written.trainer), leaves(config.trainer)
    for path in durations_in(plan.written.trainer):
        if path not in old and before[path] != now[path]:
            _LOG.info("trainer.%s: %s was %s steps and is %s steps now", path, written[path], before[path], now[path])


def in_steps(
    config: ExperimentConfig, task: Any, callbacks: Sequence[Callback] = (), given: Any = None
) -> tuple[ExperimentConfig, Epochs | None]:
    """Returns the config with steps in place of epochs and shares, and the epochs; None if nothing names epochs.

    Opens the training data once if the length of an epoch is needed and the config does not tell it: by
    trainer.steps_per_epoch, or by trainer.overfit_batches, which then are the epoch. Runs eagerly, in the scope of the
    strategy, on every worker.

    Args:
      config: The config as it was written.
      task: The task, whose build_inputs opens the data.
      callbacks: The users' callbacks, which may have epoch_begin or epoch_end.
      given: A ready-made dataset that replaces the task's; None: there is none.

    Raises:
      ConfigError: when the data does not tell the length of an epoch, or a share has no run of known length.
    """
    steps = config.trainer.overfit_batches or config.trainer.steps_per_epoch
    epoch = Fraction(steps) if steps else None
    if epoch is None and (wanted_by := _wants_epochs(config, callbacks)):
        epoch = _steps_of_epoch(config, task, given, wanted_by)
    return with_steps(config, epoch), Epochs(epoch) if epoch else None


def steps_before_training(options: TrainerConfig) -> int:
    """Returns trainer.train_steps for a process that does not train; -1, not known, if it counts epochs."""
    return -1 if unit_of(options.train_steps) else int(options.train_steps)


def let_data_restart(trainer: Any, written: ExperimentConfig) -> None:
    """Lets a dataset that ends start again if train_steps, as it was written, counts passes over it."""
    if _counts_epochs(written) and (data := getattr(trainer, "data", None)) is not None:
        data.restarts = True


def create_trial_trainer(written: ExperimentConfig, task: Any) -> Any:
    """Returns a trainer that sees steps and data as in a run, to train without a run. Called in strategy scope.

    Raises:
      ConfigError: as in_steps does.
    """
    trainer = create_trainer(in_steps(written, task)[0], task, evaluate=False)
    let_data_restart(trainer, written)
    return trainer


def counted_steps(plan: RunPlan) -> int | None:
    """Returns the steps of a run that counts epochs, for its record; None for any other run."""
    return plan.config.trainer.train_steps if _counts_epochs(plan.written) and plan.trains else None


def checkpoint_interval(plan: RunPlan) -> Interval | None:
    """Returns the exact steps between checkpoints if the config gives epochs or a share; None otherwise."""
    value = plan.written.trainer.checkpoint_interval
    return _length(plan).interval(value) if plan.trains and _is_exact(value) else None


def exact_intervals(plan: RunPlan) -> ExactIntervals:
    """Returns the intervals of loops, checkpoints and evaluations in epochs or shares."""
    if not plan.trains:
        return ExactIntervals()
    options, length = plan.written.trainer, _length(plan)
    of_loops = options.steps_per_loop, options.checkpoint_interval, options.summary_interval
    cuts = [length.interval(one) for one in of_loops if _is_exact(one)]
    of_sets = {}
    for name in validation_sets(plan.config.task):
        own = options.validation_sets.get(name)
        value = own.interval if own is not None and own.interval is not None else options.validation_interval
        of_sets[name] = length.interval(value) if _is_exact(value) else None
    return ExactIntervals([one for one in cuts if one], {name: one for name, one in of_sets.items() if one})


def summary_interval(plan: RunPlan) -> Interval | SummaryTimer | None:
    """Returns the exact steps between summaries of training, or their timer."""
    options = plan.written.trainer
    if not plan.trains:
        return None
    if seconds := seconds_of(options.summary_interval):
        return SummaryTimer(seconds)
    return _length(plan).interval(options.summary_interval) or plan.config.trainer.summary_interval


def kept_checkpoints(plan: RunPlan) -> Callable[[Any], set[int]] | None:
    """Returns a function that chooses the older checkpoints to keep by their steps; None if none are kept."""
    value = plan.written.trainer.keep_interval
    if value is None or not plan.trains:
        return None
    if seconds := seconds_of(value):
        return functools.partial(kept_by_time, plan.directory.path, seconds)
    interval = _length(plan).interval(value)
    assert interval is not None
    return functools.partial(kept_by_steps, interval)


def _length(plan: RunPlan) -> RunLength:
    return RunLength(plan.config.trainer.train_steps, plan.epochs.steps if plan.epochs else None)


def _counts_epochs(written: ExperimentConfig) -> bool:
    return unit_of(written.trainer.train_steps) == EPOCHS


def _is_exact(value: Any) -> bool:
    return unit_of(value) in (EPOCHS, SHARE)


def _wants_epochs(config: ExperimentConfig, callbacks: Sequence[Callback]) -> str:
    """Returns what needs the length of an epoch: a field of the config or a callback; "" if nothing does."""
    for path, duration in durations_in(config.trainer).items():
        if duration.unit == EPOCHS:
            return f"trainer.{path}"
    for one in callbacks:
        if one.needs_epochs or any(getattr(type(one), name) is not getattr(Callback, name) for name in NAMES):
            return f"callback {one.name}"
    return ""


def _steps_of_epoch(config: ExperimentConfig, task: Any, given: Any, wanted_by: str) -> Fraction:
    strategy, data = tf.distribute.get_strategy(), getattr(config.task, "train_data", None)
    context = tf.distribute.InputContext(worker_count(strategy), worker_index(strategy), strategy.num_replicas_in_sync)
    made = given
    if made is None and data is not None:
        made = made_inputs(inputs_of(task, data), data, context)
    steps = epoch_length(made, getattr(data, "global_batch_size", 0), context, wanted_by)
    # Workers read different files, so that one may have a batch more: the chief's number counts.
    return Fraction(*(broadcast_from_chief(strategy, part) for part in (steps.numerator, steps.denominator)))
