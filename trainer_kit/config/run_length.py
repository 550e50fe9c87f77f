"""Turns the durations of a config into steps, once the length of an epoch is known.

The module has no side effects, and needs no TensorFlow.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from trainer_kit.config.fields import walk_values
from trainer_kit.config.schema.durations import EPOCHS, SECONDS, SHARE, Duration, RoundedSteps
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.sources.layer import unflatten_values
from trainer_kit.errors import ConfigError, Mistake


def find_durations(options: TrainerConfig) -> dict[str, Duration]:
    """Returns the durations of epochs and shares in the section trainer, by dotted path in it."""
    durations = {}
    for path, value in walk_values(options):
        if isinstance(value, Duration) and value.unit != SECONDS:
            durations[path] = value
    return durations


def find_length_mistakes(options: TrainerConfig) -> list[Mistake]:
    """Returns the mistakes in the length of a training run, and in the shares of it."""
    if options.train_steps == 0:
        advice = 'set it to a number of steps or epochs, such as 1000 or "3 epochs"'
        return [Mistake("trainer.train_steps", "0 trains nothing", advice)]
    return find_share_mistakes(options)


def find_share_mistakes(options: TrainerConfig) -> list[Mistake]:
    """Returns a mistake for each share of a training run of unknown length.

    Such a run has no step, or ends when its data ends.
    """
    if isinstance(options.train_steps, Duration) or options.train_steps > 0:
        return []

    length = "ends when its data ends"
    if not options.train_steps:
        length = "has no step (trainer.train_steps=0)"
    mistakes = []
    durations = find_durations(options)
    for path, duration in durations.items():
        if duration.unit == SHARE:
            problem = f"{duration!r} is a share of a run that {length}"
            advice = "set trainer.train_steps to a number of steps or epochs"
            mistakes.append(Mistake(f"trainer.{path}", problem, advice))
    return mistakes


def replace_durations(
    config: ExperimentConfig, steps_per_epoch: Fraction | None
) -> ExperimentConfig:
    """Returns the config with steps in place of epochs and shares.

    A config that has none is returned as it is. The steps of schedules and warm-ups of one of
    several optimizers count its updates.

    Args:
      config: The config as it was written.
      steps_per_epoch: The steps of an epoch, or None if no duration counts epochs.

    Raises:
      ConfigError: When a share has no run of known length, or a rule of the config is broken.
    """
    options = config.trainer
    if mistakes := find_share_mistakes(options):
        raise ConfigError(mistakes)

    # The run comes first: it is what a share is a part of.
    length = options.train_steps
    units: dict[str, Any] = {EPOCHS: steps_per_epoch, SHARE: length}
    if isinstance(length, Duration):
        exact_length = length.amount * units[EPOCHS]
        units[SHARE] = RoundedSteps(exact_length)

    steps: dict[str, int] = {}
    durations = find_durations(options)
    for path, duration in durations.items():
        exact_steps = duration.amount * units[duration.unit]
        steps[path] = RoundedSteps(exact_steps)

        # An optimizer with a period updates its variables once in so many steps.
        if path.startswith("optimizers."):
            name = path.split(".")[1]
            period = options.optimizers[name].period
            updates = steps[path] // period
            steps[path] = max(1, updates)
    if not steps:
        return config
    return config.replace(trainer=unflatten_values(steps))
