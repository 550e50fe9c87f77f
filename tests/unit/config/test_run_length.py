"""Durations as steps, once the length of an epoch is known."""

from __future__ import annotations

import copy
from fractions import Fraction

import pytest

from tests.config_builders import collect_mistakes
from trainer_kit.config.run_length import replace_durations
from trainer_kit.config.schema.durations import RoundedSteps
from trainer_kit.config.schema.experiment import ExperimentConfig

EPOCH = Fraction(103, 10)


def test_epochs_and_shares_become_whole_steps_everywhere() -> None:
    cosine = {"initial_learning_rate": 0.1, "decay_steps": "100 %"}
    written = ExperimentConfig(
        trainer={
            "train_steps": "2 epochs",
            "steps_per_loop": 5,
            "summary_interval": "1 epochs",
            "checkpoint_interval": "30 min",
            "validation_interval": "50 %",
            "validation_sets": {"dev": {"interval": "1 epoch"}},
            "optimizer_config": {
                "optimizer": {"type": "adam"},
                "learning_rate": {"type": "cosine", "cosine": cosine},
                "warmup": {"type": "linear", "linear": {"warmup_steps": "20 %"}},
            },
        },
        task={"validation_data": {"dev": {}, "test": {}}},
    )
    trainer = replace_durations(written, EPOCH).trainer

    assert trainer.train_steps == 21
    assert trainer.validation_interval == trainer.validation_sets["dev"].interval == 11
    assert trainer.optimizer_config.learning_rate.get().decay_steps == 21
    assert trainer.optimizer_config.warmup.get().warmup_steps == 5
    # Loops are cut there, so it need not be a multiple of steps_per_loop.
    assert trainer.summary_interval == 11
    assert type(trainer.as_dict()["summary_interval"]) is int
    assert trainer.checkpoint_interval == "30 min"
    assert written.trainer.train_steps == "2 epochs"


def test_schedules_of_a_slow_optimizer_count_its_updates() -> None:
    slow = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {
            "type": "cosine",
            "cosine": {"initial_learning_rate": 0.1, "decay_steps": "100 %"},
        },
        "period": 3,
    }
    written = ExperimentConfig(trainer={"train_steps": 20, "optimizers": {"slow": slow}})
    resolved = replace_durations(written, None).trainer.optimizers["slow"]

    assert resolved.learning_rate.get().decay_steps == 20 // 3


@pytest.mark.parametrize(
    ("train_steps", "said"),
    [(-1, "a share of a run that ends when"), (0, "a share of a run that has no step")],
)
def test_a_share_needs_a_run_of_known_length(train_steps: int, said: str) -> None:
    written = ExperimentConfig(trainer={"train_steps": train_steps, "validation_interval": "20 %"})
    assert (
        said
        in collect_mistakes(replace_durations, written, None)["trainer.validation_interval"].problem
    )


def test_an_interval_keeps_the_fraction_of_a_step() -> None:
    values = {"train_steps": 22, "checkpoint_interval": "1 epochs", "validation_interval": "20 %"}
    resolved = replace_durations(ExperimentConfig(trainer=values), EPOCH)

    for trainer in (
        resolved.trainer,
        copy.deepcopy(resolved).trainer,
        resolved.replace(trainer={"max_to_keep": 2}).trainer,
    ):
        assert isinstance(trainer.checkpoint_interval, RoundedSteps)
        assert trainer.checkpoint_interval == 11
        assert trainer.checkpoint_interval.exact == EPOCH
        assert trainer.validation_interval.exact == Fraction(22, 5)
