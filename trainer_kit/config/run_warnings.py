"""Warnings about a run: a learning rate that reaches 0 long before the last step, intervals that are never reached."""

from __future__ import annotations

from typing import Any

from trainer_kit.config.schema.experiment import TrainerConfig

_SMALL_SHARE = 0.01  # of the run; some steps at rate 0 come from rounding


def rate_end_warnings(options: Any) -> list[str]:
    """Returns a warning for each learning rate that is 0 for the last part of a run, with advice.

    A schedule that ends above 0 gives no warning: to continue at a small constant rate is a usual choice. A warm-up
    replaces the first steps of a schedule and does not delay its end. A schedule counts the updates of its optimizer.

    Args:
      options: A TrainerConfig, or any object with its fields.
    """
    sections = {"trainer.optimizer_config": (getattr(options, "optimizer_config", None), 1)}
    for name, section in (getattr(options, "optimizers", None) or {}).items():
        sections[f"trainer.optimizers.{name}"] = (section, section.period)
    warnings = (_warning(path, section, options.train_steps, period) for path, (section, period) in sections.items())
    return [warning for warning in warnings if warning]


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


def _warning(section_path: str, section: Any, train_steps: int, period: int) -> str:
    rates, steps = getattr(section, "learning_rate", None), train_steps // period
    kind = getattr(rates, "type", None)
    if kind not in ("polynomial", "cosine", "power_linear") or steps <= 0:
        return ""
    schedule, name = getattr(rates, kind), "total_decay_steps" if kind == "power_linear" else "decay_steps"
    last = {"polynomial": "end_learning_rate", "cosine": "alpha"}.get(kind, "")
    decay = getattr(schedule, name, None)
    end_rate: Any = getattr(schedule, last, None) if last else None
    if not decay or end_rate or getattr(schedule, "cycle", False):
        return ""
    offset = getattr(schedule, "offset", 0)
    idle = steps - (decay + offset)
    if idle < _SMALL_SHARE * steps:
        return ""
    path = f"{section_path}.learning_rate.{kind}.{name}"
    one, what = ("step", "training steps") if period == 1 else ("update", f"updates (one in {period} steps)")
    return (
        f"{path}={decay}: the learning rate is 0 from {one} {decay + offset} on, so the last {idle} of {steps} {what} "
        f"({idle / steps:.0%}) change nothing; set it to {steps - offset}, or lower trainer.train_steps to "
        f"{(decay + offset) * period}"
    )
