"""Durations as they are written in a config: what is taken, and what a mistake says."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.config_builders import sample_experiment, wrong_fields
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.durations import EPOCHS, SECONDS, SHARE, Duration
from trainer_kit.config.schema.experiment import TrainerConfig


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("3 epochs", 3, EPOCHS),
        ("3 epoch", 3, EPOCHS),
        ("0.5epochs", Fraction(1, 2), EPOCHS),
        ("20 %", Fraction(1, 5), SHARE),
        ("20%", Fraction(1, 5), SHARE),
        ("1.5 h", 5400, SECONDS),
        ("30 Min", 1800, SECONDS),
        ("30m", 1800, SECONDS),
    ],
)
def test_a_duration_is_read_with_or_without_a_space(text: str, amount: float, unit: str) -> None:
    duration = Duration.parse(text)

    assert duration is not None
    assert duration == text
    assert duration.amount == Fraction(amount)
    assert duration.unit == unit


@pytest.mark.parametrize(
    "text", ["epochs", "3", "0 epochs", "-1 epochs", "120 %", "3 epocs", "1/2 h", ""]
)
def test_other_texts_are_no_durations(text: str) -> None:
    assert Duration.parse(text) is None


def test_python_yaml_gin_and_text_give_the_same_duration(experiment: str) -> None:
    sources = (
        ConfigSources(gin_params=("TrainerConfig.train_steps = '3 epochs'",)),
        ConfigSources(params_overrides=("trainer.train_steps=3 epochs",)),
        ConfigSources(params_overrides=("trainer: {train_steps: 3 epochs}",)),
    )
    for source in sources:
        trainer = resolve_config(experiment, source).config.trainer
        assert trainer == sample_experiment(steps="3 epochs").trainer
        assert trainer.as_dict()["train_steps"] == "3 epochs"


def test_steps_may_be_written_with_an_exponent(experiment: str) -> None:
    source = ConfigSources(params_overrides=("trainer.train_steps=1e3",))

    steps = resolve_config(experiment, source).config.trainer.train_steps

    assert (steps, type(steps)) == (1000, int)
    assert wrong_fields(TrainerConfig, {"train_steps": 1000.5}) == ["train_steps"]


@pytest.mark.parametrize("field", ["checkpoint_interval", "summary_interval"])
def test_an_exact_resume_refuses_intervals_by_the_clock(field: str) -> None:
    assert wrong_fields(TrainerConfig, {field: "30 min", "require_exact_resume": True}) == [field]
