"""Durations as they are written in a config: what is taken, and what a mistake says."""

from __future__ import annotations

from fractions import Fraction

import pytest

from trainer_kit.config.merge import apply
from trainer_kit.config.schema.durations import EPOCHS, SECONDS, SHARE, Duration
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.sources.config_files import read_params_override
from trainer_kit.config.sources.gin_source import gin_first_pass
from trainer_kit.errors import ConfigError


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
    duration = Duration.read(text)
    assert duration is not None
    assert (duration, duration.amount, duration.unit) == (text, Fraction(amount), unit)


@pytest.mark.parametrize("text", ["epochs", "3", "0 epochs", "-1 epochs", "120 %", "3 epocs", "1/2 h", ""])
def test_other_texts_are_no_durations(text: str) -> None:
    assert Duration.read(text) is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "train_steps=3 epocs",
            "'3 epocs' is not a whole number of at least -1, or a duration such as '3 epochs'; "
            "did you mean '3 epochs'?",
        ),
        ("train_steps=30 min", "'30 min' is not a whole number of at least -1, or a duration such as '3 epochs'"),
        ("train_steps=500 steps", "'500 steps' is not a whole number of at least -1"),
        ("train_steps='500'", "write 500 without quotes"),
        ("checkpoint_interval=0 epochs", "'30 min'; give an amount above 0, and at most 100 %"),
        ("checkpoint_interval=120 %", "'30 min'; give an amount above 0, and at most 100 %"),
        ("checkpoint_interval=0.2", "or a duration such as '3 epochs', '20 %' or '30 min'"),
        ("checkpoint_interval=30 mins", "did you mean '30 min'?"),
        ("max_time=2", "2 is not a duration such as '30 min' or null"),
        ("optimizer_config.warmup={type: linear, linear: {warmup_steps: 5 percnt}}", "did you mean '5 percent'?"),
    ],
)
def test_a_wrong_duration_tells_what_is_allowed(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply(ExperimentConfig(), [read_params_override(f"trainer.{setting}")])
    assert message in str(caught.value)


def test_python_yaml_gin_and_text_give_the_same_duration(experiment: str) -> None:
    bound = gin_first_pass((), ("TrainerConfig.train_steps = '3 epochs'",), experiment).layer
    layers = [read_params_override(f"trainer{of}") for of in (".train_steps=3 epochs", ": {train_steps: 3 epochs}")]
    built = [apply(ExperimentConfig(), [layer]).config.trainer for layer in (bound, *layers)]
    assert built == [TrainerConfig(train_steps="3 epochs")] * 3
    assert built[0].as_dict()["train_steps"] == "3 epochs"


@pytest.mark.parametrize("field", ["checkpoint_interval", "summary_interval"])
def test_an_exact_resume_refuses_intervals_by_the_clock(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: '30 min' comes at steps that differ from run to run"):
        TrainerConfig(**{field: "30 min", "require_exact_resume": True})
