"""Warnings about a run: a learning rate that reaches 0 long before the last step, intervals of a wrong length."""

from __future__ import annotations

from typing import Any

from trainer_kit.config.schema.durations import RoundedSteps
from trainer_kit.config.schema.experiment import TrainerConfig

_SMALL_SHARE = 0.01  # of the run; some steps at rate 0 come from rounding
# The schedules that can end at 0, with their fields of the length and of the last rate.
_ENDS = {
    "polynomial": ("decay_steps", "end_learning_rate"),
    "cosine": ("decay_steps", "alpha"),
    "power_linear": ("total_decay_steps", ""),
}


def find_zero_rate_warnings(options: Any) -> list[str]:
    """Returns a warning for each learning rate that is 0 for the last part of a run, with advice.

    A schedule that ends above 0 gives no warning: to continue at a small constant rate is a usual
    choice. A warm-up replaces the first steps of a schedule and does not delay its end. A schedule
    counts the updates of its optimizer.

    Args:
      options: A TrainerConfig, or any object with its fields.
    """
    sections = {"optimizer_config": (getattr(options, "optimizer_config", None), 1)}
    for name, section in (getattr(options, "optimizers", None) or {}).items():
        sections[f"optimizers.{name}"] = (section, section.period)
    warnings = []
    for path, (section, period) in sections.items():
        rates = getattr(section, "learning_rate", None)
        kind = getattr(rates, "type", None)
        if kind not in _ENDS:
            continue
        field, last_rate = _ENDS[kind]
        schedule: Any = getattr(rates, kind)
        decay: int | None = getattr(schedule, field, None)
        if not decay or getattr(schedule, last_rate, False) or getattr(schedule, "cycle", False):
            continue
        end: int = decay + getattr(schedule, "offset", 0)
        updates = options.train_steps // period
        if updates - end >= max(_SMALL_SHARE * updates, 1):
            unit = "steps" if period == 1 else f"updates (one in {period} steps)"
            warnings.append(
                f"trainer.{path}.learning_rate.{kind}.{field}={decay}: the learning rate is 0 after"
                f" {end} {unit}, so the last {updates - end} of {updates} change nothing; set it to"
                f" {updates - end + decay}, or lower trainer.train_steps to {end * period}"
            )
    return warnings


def find_interval_warnings(options: TrainerConfig) -> list[str]:
    """Returns a warning if an interval that was set, or a patience, is longer than the run; `options` has steps."""
    total = options.train_steps
    early = options.early_stopping
    names = ("checkpoint_interval", "summary_interval", "validation_interval")
    values = {
        name: getattr(options, name)
        for name in names
        if getattr(options, name) != getattr(TrainerConfig, name)
    }
    if early and not early.eval_name:
        values["early_stopping.patience"] = early.patience * options.validation_interval
    late = " and ".join(
        f"trainer.{name}"
        for name, steps in values.items()
        if isinstance(steps, int) and steps > total
    )
    return (
        [f"{late}: longer than the run of {total} steps, so it is never reached"]
        if total > 0 and late
        else []
    )


def find_save_interval_warnings(options: TrainerConfig) -> list[str]:
    """Returns a warning if loops are longer than the steps between checkpoints; `options` has steps."""
    interval = options.checkpoint_interval
    is_cut = isinstance(
        interval, RoundedSteps
    )  # loops are cut where an interval of rounded steps is due
    if not isinstance(interval, int) or is_cut or interval >= options.steps_per_loop:
        return []
    return [
        f"trainer.checkpoint_interval={interval} is less than"
        f" trainer.steps_per_loop={options.steps_per_loop}, but checkpoints are saved only at the"
        " ends of loops; lower trainer.steps_per_loop or raise trainer.checkpoint_interval"
    ]
