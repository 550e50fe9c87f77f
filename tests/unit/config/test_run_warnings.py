"""A learning rate that is 0 for the last part of a run is warned of, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.run_warnings import find_zero_rate_warnings
from trainer_kit.config.schema.experiment import TrainerConfig


def _build_options(kind: str, train_steps: int = 900, **schedule: Any) -> TrainerConfig:
    section = {"initial_learning_rate": 0.1, **schedule}
    rates = {"type": kind, kind: section}
    return TrainerConfig(train_steps=train_steps, optimizer_config={"learning_rate": rates})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        _build_options("cosine", decay_steps=600),
        _build_options("polynomial", decay_steps=600, end_learning_rate=0.0),
        _build_options("power_linear", total_decay_steps=600),
        _build_options("cosine", decay_steps=500, offset=100),
    ],
)
def test_a_rate_of_0_for_a_third_of_the_run_is_warned_of(options: TrainerConfig) -> None:
    (warning,) = find_zero_rate_warnings(options)

    assert "0 after 600 steps, so the last 300 of 900 " in warning
    assert f"set it to {800 if 'decay_steps=500' in warning else 900}" in warning


@pytest.mark.parametrize(
    "options",
    [
        _build_options("cosine", decay_steps=900),
        _build_options("cosine", decay_steps=600, alpha=0.01),
        _build_options("cosine", decay_steps=895),
        _build_options("cosine", train_steps=-1, decay_steps=600),
        _build_options("polynomial", decay_steps=600),
        _build_options("polynomial", decay_steps=600, end_learning_rate=0.0, cycle=True),
        _build_options("exponential", decay_steps=600, decay_rate=0.5),
        TrainerConfig(),
    ],
)
def test_rates_that_go_on_are_not_warned_of(options: TrainerConfig) -> None:
    assert find_zero_rate_warnings(options) == []


def test_the_schedule_of_one_of_several_counts_its_updates() -> None:
    rates = {"type": "cosine", "cosine": {"initial_learning_rate": 0.1, "decay_steps": 600}}
    fields = {"optimizer": {"type": "sgd"}, "learning_rate": rates, "variables": (".",)}
    optimizers = {"slow": {**fields, "period": 2}, "fast": fields}

    (warning,) = find_zero_rate_warnings(TrainerConfig(train_steps=1200, optimizers=optimizers))  # type: ignore[arg-type]

    assert warning.startswith("trainer.optimizers.fast.learning_rate.cosine.decay_steps=600: ")

    warning, _ = find_zero_rate_warnings(TrainerConfig(train_steps=1800, optimizers=optimizers))  # type: ignore[arg-type]
    assert "0 after 600 updates (one in 2 steps), so the last 300 of 900 " in warning
    assert "set it to 900, or lower trainer.train_steps to 1200" in warning
