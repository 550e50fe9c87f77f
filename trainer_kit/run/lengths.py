"""Resolves the lengths in a config: steps take the place of epochs and shares.

This happens before the trainer is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback
from trainer_kit.callbacks.callback_list import EPOCH_EVENTS
from trainer_kit.config.run_length import find_durations, replace_durations
from trainer_kit.config.schema.durations import EPOCHS
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.inputs.epoch_length import compute_epoch_length
from trainer_kit.inputs.registered_datasets import get_build_inputs
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.runtime.collectives import broadcast_int, worker_count, worker_index
from trainer_kit.training.loops.intervals import Epochs
from trainer_kit.typing import Dataset, TaskLike


def resolve_lengths(
    config: ExperimentConfig,
    task: TaskLike,
    callbacks: Sequence[Callback] = (),
    dataset: Dataset | None = None,
) -> tuple[ExperimentConfig, Epochs | None]:
    """Puts steps in place of epochs and shares.

    Opens the training data once if the length of an epoch is needed and the config does not contain
    it. It can be trainer.steps_per_epoch, or trainer.overfit_batches, which then are the epoch.
    Runs eagerly, in the scope of the strategy, on every worker.

    Args:
      config: The config as it was written.
      task: The task, whose build_inputs opens the data.
      callbacks: The users' callbacks, which may have epoch_begin or epoch_end.
      dataset: A ready-made dataset that replaces the task's. None means the task's.

    Returns:
      (config, epochs): the config with steps, and the epochs. None if nothing counts epochs.

    Raises:
      ConfigError: when the data does not indicate the length of an epoch, or a share has no run of
        known length.
    """
    options = config.trainer
    if steps := options.overfit_batches or options.steps_per_epoch:
        return replace_durations(config, Fraction(steps)), Epochs(Fraction(steps))

    # What counts epochs: fields of the config, and callbacks.
    users: list[str] = []
    for path, duration in find_durations(options).items():
        if duration.unit == EPOCHS:
            users.append(f"trainer.{path}")
    for callback in callbacks:
        has_events = any(
            getattr(type(callback), name) is not getattr(Callback, name) for name in EPOCH_EVENTS
        )
        if callback.needs_epochs or has_events:
            users.append(f"callback {callback.name}")
    if not users:
        return replace_durations(config, None), None

    # The data gives the length of an epoch.
    strategy = tf.distribute.get_strategy()
    context = tf.distribute.InputContext(
        worker_count(strategy), worker_index(strategy), strategy.num_replicas_in_sync
    )
    data = getattr(config.task, "train_data", None)
    if dataset is None and data is not None:
        build_inputs = get_build_inputs(task, data)
        dataset = call_build_inputs(build_inputs, data, context)
    batch_size = getattr(data, "global_batch_size", 0)
    length = compute_epoch_length(dataset, batch_size, context, users[0])

    # Workers read different files, so that one may have a batch more: the chief's number counts.
    numerator = broadcast_int(strategy, length.numerator)
    denominator = broadcast_int(strategy, length.denominator)
    epoch = Fraction(numerator, denominator)
    return replace_durations(config, epoch), Epochs(epoch)
