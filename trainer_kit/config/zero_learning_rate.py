"""Detects a learning rate that reaches 0 long before the last training step. Pure; no TensorFlow."""

from __future__ import annotations

from typing import Any

_SMALL_SHARE = 0.01  # of the run; some steps at rate 0 come from rounding


def rate_end_warning(options: Any) -> str:
    """Returns a warning when the learning rate is 0 for the last part of a run, with advice; "" when it is not.

    A schedule that ends above 0 gives no warning: to continue at a small constant rate is a usual choice. A warm-up
    replaces the first steps of a schedule and does not delay its end.

    Args:
      options: A TrainerConfig, or any object with its fields.
    """
    rates = getattr(getattr(options, "optimizer_config", None), "learning_rate", None)
    kind, steps = getattr(rates, "type", None), options.train_steps
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
    path = f"trainer.optimizer_config.learning_rate.{kind}.{name}"
    return (
        f"{path}={decay}: the learning rate is 0 from step {decay + offset} on, so the last {idle} of "
        f"{steps} training steps ({idle / steps:.0%}) change nothing; set it to {steps - offset}, or lower "
        f"trainer.train_steps to {decay + offset}"
    )
