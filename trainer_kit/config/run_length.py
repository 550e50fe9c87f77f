"""Turns the durations of a config into steps, once the length of an epoch is known. Pure; no TensorFlow.

An epoch may have a fraction of a step: 103 examples in batches of 10 are 10.3 steps, and epoch e ends with step
ceil(e * 10.3). So intervals of epochs, and shares of a run, are fractions of steps: an event is due at the first step
that reaches a multiple of the interval. The config of tasks and trainers holds whole steps, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainer_kit.config.allowed_values import durations_of
from trainer_kit.config.fields import fields_of, leaves
from trainer_kit.config.schema.base import Config
from trainer_kit.config.schema.durations import EPOCHS, SECONDS, SHARE, Duration, read_duration, unit_of
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.errors import ConfigError, Mistake

Interval = int | Fraction  # of steps
_TOTAL = "train_steps"


@dataclass(frozen=True)
class RunLength:
    """The length of a run and of its epochs.

    Attributes:
      steps: The global step at which training ends; -1: when the data ends.
      epoch: The steps of an epoch, which may be a fraction; None: not known.
    """

    steps: int
    epoch: Fraction | None = None

    def interval(self, value: int | str | None) -> Interval | None:
        """Returns the steps of an interval as a config holds it; None for a time, and for None."""
        duration = read_duration(value) if isinstance(value, str) else None
        if duration is None or duration.unit == SECONDS:
            return value if isinstance(value, int) else None
        exact = self.exact(duration)
        return exact.numerator if exact.denominator == 1 else exact

    def exact(self, duration: Duration) -> Fraction:
        """Returns the steps of a duration in epochs or of a share of the run."""
        if duration.unit == EPOCHS:
            assert self.epoch is not None, "durations_in finds the epochs, before which the length has to be known"
            return duration.amount * self.epoch
        return duration.amount * self.steps


def interval_warnings(options: TrainerConfig) -> list[str]:
    """Returns a warning if an interval that was set, or a patience, is longer than the run; `options` has steps."""
    total = options.train_steps
    early = options.early_stopping
    names = ("checkpoint_interval", "summary_interval", "validation_interval")
    values = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(TrainerConfig, name)}
    if early and not early.eval_name:
        values["early_stopping.patience"] = early.patience * options.validation_interval
    late = " and ".join(f"trainer.{name}" for name, steps in values.items() if isinstance(steps, int) and steps > total)
    return [f"{late}: longer than the run of {total} steps, so it is never reached"] if total > 0 and late else []


def durations_in(options: TrainerConfig) -> dict[str, Duration]:
    """Returns the durations of epochs and shares in the section trainer, by dotted path inside it."""
    found = {}
    for path, value in leaves(options).items():
        duration = read_duration(value) if isinstance(value, str) else None
        if duration is not None and duration.unit != SECONDS and _takes_durations(options, path):
            found[path] = duration
    return found


def share_mistakes(options: TrainerConfig) -> list[Mistake]:
    """Returns a mistake for each share of a training run, if the run has no step or ends when its data ends."""
    if unit_of(options.train_steps) or options.train_steps > 0:
        return []
    length = "has no step (trainer.train_steps=0)" if not options.train_steps else "ends when its data ends"
    return [
        Mistake(
            f"trainer.{path}",
            f"{leaves(options)[path]!r} is a share of a run that {length}",
            "set trainer.train_steps to a number of steps or epochs",
        )
        for path, duration in durations_in(options).items()
        if duration.unit == SHARE
    ]


def with_steps(config: ExperimentConfig, epoch: Fraction | None) -> ExperimentConfig:
    """Returns the config with whole steps in place of epochs and shares; unchanged if it has none.

    Steps of schedules and warm-ups of one of several optimizers count its updates.

    Args:
      config: The config as it was written.
      epoch: The steps of an epoch; None if no duration counts epochs.

    Raises:
      ConfigError: when a share has no run of known length, or a rule of the config is broken.
    """
    options, found = config.trainer, durations_in(config.trainer)
    if not found:
        return config
    if mistakes := share_mistakes(options):
        raise ConfigError(mistakes)
    length = RunLength(options.train_steps, epoch)
    if _TOTAL in found:
        length = RunLength(math.ceil(length.exact(found.pop(_TOTAL))), epoch)
    steps = {path: math.ceil(length.exact(duration)) for path, duration in found.items()}
    for path in steps:
        if path.startswith("optimizers."):
            steps[path] = max(1, steps[path] // options.optimizers[path.split(".")[1]].period)
    steps[_TOTAL] = length.steps
    return config.replace(trainer=_nested(_of_whole_loops(steps, options)))


def _of_whole_loops(steps: dict[str, int], options: TrainerConfig) -> dict[str, int]:
    """Returns the steps with a summary interval that is a multiple of a loop's, as the config's rule demands."""
    loop, summary = (steps.get(name, getattr(options, name)) for name in ("steps_per_loop", "summary_interval"))
    changed = "summary_interval" in steps or "steps_per_loop" in steps
    whole = changed and isinstance(summary, int)
    return {**steps, "summary_interval": -(-summary // loop) * loop} if whole else steps


def _takes_durations(section: Any, path: str) -> bool:
    *around, name = path.split(".")
    for part in around:
        section = section[part] if isinstance(section, Mapping) else getattr(section, part)
    if not isinstance(section, Config):
        return False
    field = fields_of(type(section)).get(name)
    return field is not None and bool(durations_of(field.annotation, field.metadata))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts in place of dotted paths."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *around, name = path.split(".")
        inner = nested
        for part in around:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return nested
