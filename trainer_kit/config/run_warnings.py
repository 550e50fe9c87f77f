"""Warnings about a run: a learning rate that reaches 0 too early, and saves that come too late."""

from __future__ import annotations

from typing import Any

from trainer_kit.config.schema.durations import RoundedSteps
from trainer_kit.config.schema.experiment import TrainerConfig

# Of the run. Some steps at rate 0 come from rounding.
_SMALL_SHARE = 0.01

# The schedules that can end at 0, with their fields of the length and of the last rate.
_ENDS = {
    "polynomial": ("decay_steps", "end_learning_rate"),
    "cosine": ("decay_steps", "alpha"),
    "power_linear": ("total_decay_steps", ""),
}


def find_zero_rate_warnings(options: TrainerConfig) -> list[str]:
    """Returns a warning for each learning rate that is 0 for the last part of a run, with advice.

    A schedule that ends above 0 gives no warning: to continue at a small constant rate is a usual
    choice. A warm-up replaces the first steps of a schedule and does not delay its end. A schedule
    counts the updates of its optimizer.

    Args:
      options: A TrainerConfig, or any object with its fields.
    """
    sections = {"optimizer_config": (getattr(options, "optimizer_config", None), 1)}
    named_sections = getattr(options, "optimizers", None) or {}
    for name, section in named_sections.items():
        sections[f"optimizers.{name}"] = (section, section.period)

    warnings = []
    for path, (section, period) in sections.items():
        rates = getattr(section, "learning_rate", None)
        kind = getattr(rates, "type", None)
        if kind not in _ENDS:
            continue
        length_field, last_rate_field = _ENDS[kind]
        schedule: Any = getattr(rates, kind)
        decay: int | None = getattr(schedule, length_field, None)

        # A schedule with a last rate stays at it, and a cycle starts over.
        ends_above_zero = getattr(schedule, last_rate_field, False)
        starts_over = getattr(schedule, "cycle", False)
        if not decay or ends_above_zero or starts_over:
            continue

        end: int = decay + getattr(schedule, "offset", 0)
        updates = options.train_steps // period
        idle_updates = updates - end
        if idle_updates >= max(_SMALL_SHARE * updates, 1):
            unit = "steps" if period == 1 else f"updates (one in {period} steps)"
            warnings.append(
                f"trainer.{path}.learning_rate.{kind}.{length_field}={decay}:"
                f" the learning rate is 0 after {end} {unit},"
                f" so the last {idle_updates} of {updates} change nothing;"
                f" set it to {idle_updates + decay},"
                f" or lower trainer.train_steps to {end * period}"
            )
    return warnings


def find_save_interval_warnings(options: TrainerConfig) -> list[str]:
    """Returns a warning if loops are longer than the steps between checkpoints.

    Args:
      options: The section trainer, with steps in place of epochs and shares.
    """
    interval = options.checkpoint_interval

    # Loops are cut where an interval of rounded steps is due.
    is_cut = isinstance(interval, RoundedSteps)
    if not isinstance(interval, int) or is_cut or interval >= options.steps_per_loop:
        return []
    return [
        f"trainer.checkpoint_interval={interval} is less than"
        f" trainer.steps_per_loop={options.steps_per_loop}, but checkpoints are saved only at the"
        " ends of loops; lower trainer.steps_per_loop or raise trainer.checkpoint_interval"
    ]
