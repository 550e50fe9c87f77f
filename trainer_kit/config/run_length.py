"""Turns the durations of a config into steps, once the length of an epoch is known. Pure; no TensorFlow."""

from __future__ import annotations

from fractions import Fraction

from trainer_kit.config.fields import leaves
from trainer_kit.config.schema.durations import SECONDS, SHARE, Duration, read_duration
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.sources.layer import nest
from trainer_kit.errors import ConfigError, Mistake


def durations_in(options: TrainerConfig) -> dict[str, Duration]:
    """Returns the durations of epochs and shares in the section trainer, by dotted path inside it."""
    durations = {path: read_duration(value) for path, value in leaves(options).items()}
    return {path: duration for path, duration in durations.items() if duration and duration.unit != SECONDS}


def share_mistakes(options: TrainerConfig) -> list[Mistake]:
    """Returns a mistake for each share of a training run, if the run has no step or ends when its data ends."""
    if isinstance(options.train_steps, Duration) or options.train_steps > 0:
        return []
    length = "has no step (trainer.train_steps=0)" if not options.train_steps else "ends when its data ends"
    return [
        Mistake(
            f"trainer.{path}",
            f"{duration!r} is a share of a run that {length}",
            "set trainer.train_steps to a number of steps or epochs",
        )
        for path, duration in durations_in(options).items()
        if duration.unit == SHARE
    ]


def with_steps(config: ExperimentConfig, epoch: Fraction | None) -> ExperimentConfig:
    """Returns the config with steps in place of epochs and shares; unchanged if it has none.

    Steps of schedules and warm-ups of one of several optimizers count its updates.

    Args:
      config: The config as it was written.
      epoch: The steps of an epoch; None if no duration counts epochs.

    Raises:
      ConfigError: when a share has no run of known length, or a rule of the config is broken.
    """
    options = config.trainer
    if mistakes := share_mistakes(options):
        raise ConfigError(mistakes)

    run = options.train_steps
    if isinstance(run, Duration):
        run = run.steps(0, epoch)
    steps: dict[str, int] = {path: duration.steps(run, epoch) for path, duration in durations_in(options).items()}
    for path in steps:
        if path.startswith("optimizers."):
            period = options.optimizers[path.split(".")[1]].period
            steps[path] = max(1, steps[path] // period)
    return config.replace(trainer=nest(steps)) if steps else config
