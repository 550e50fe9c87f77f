"""Puts steps in place of the epochs and shares in the config of a training run, before its trainer is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.base import Callback
from trainer_kit.callbacks.callback_list import EPOCH_EVENTS
from trainer_kit.config.run_length import durations_in, with_steps
from trainer_kit.config.schema.durations import EPOCHS
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.inputs.epoch_length import epoch_length
from trainer_kit.inputs.registered_datasets import inputs_of
from trainer_kit.inputs.sources.base import made_inputs
from trainer_kit.run.plan import RunPlan
from trainer_kit.runtime.collectives import broadcast_from_chief, worker_count, worker_index
from trainer_kit.training.loops.intervals import Epochs


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
    return dataclasses.replace(plan, config=config, epochs=epochs)


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


def _wants_epochs(config: ExperimentConfig, callbacks: Sequence[Callback]) -> str:
    """Returns what needs the length of an epoch: a field of the config or a callback; "" if nothing does."""
    for path, duration in durations_in(config.trainer).items():
        if duration.unit == EPOCHS:
            return f"trainer.{path}"
    for callback in callbacks:
        has_events = any(getattr(type(callback), name) is not getattr(Callback, name) for name in EPOCH_EVENTS)
        if callback.needs_epochs or has_events:
            return f"callback {callback.name}"
    return ""


def _steps_of_epoch(config: ExperimentConfig, task: Any, given: Any, wanted_by: str) -> Fraction:
    strategy = tf.distribute.get_strategy()
    data = getattr(config.task, "train_data", None)
    context = tf.distribute.InputContext(worker_count(strategy), worker_index(strategy), strategy.num_replicas_in_sync)
    dataset = given
    if dataset is None and data is not None:
        dataset = made_inputs(inputs_of(task, data), data, context)
    steps = epoch_length(dataset, getattr(data, "global_batch_size", 0), context, wanted_by)
    # Workers read different files, so that one may have a batch more: the chief's number counts.
    return Fraction(*(broadcast_from_chief(strategy, part) for part in (steps.numerator, steps.denominator)))
