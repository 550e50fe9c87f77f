"""When the loss or the weights of a run count as diverged."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainer_kit.errors import DivergedError
from trainer_kit.training.finite_checks import FiniteCheck, reported_loss


class _Trainer:
    """What is looked at of a trainer."""

    def __init__(self, sound: bool | None, finite: bool = True) -> None:
        self.sound, self.state, self.finite, self.looks = sound, self, finite, 0

    def weights_are_sound(self) -> bool:
        self.looks += 1
        return self.finite


@pytest.mark.parametrize(("step", "loss", "sound"), [(4, 2.0, True), (5, 1.0, True), (5, 0.5, None)])
def test_a_loss_within_its_bound_and_one_before_the_bound_counts_will_do(step: int, loss: float, sound: Any) -> None:
    trainer = _Trainer(sound)
    FiniteCheck(trainer, (1.0, 5)).check(step, {"training_loss": loss})
    assert (trainer.sound, trainer.looks) == (sound, 0)  # nothing is looked at for it


@pytest.mark.parametrize(
    ("loss", "sound", "message"),
    [
        (1.5, True, r"training_loss is 1.5 at step 5 \(trainer.loss_upper_bound is 1\)"),
        (math.nan, True, "training_loss is nan"),
        (0.5, False, "a weight is not finite at step 5"),
    ],
)
def test_a_loss_or_a_weight_that_is_not_sound_is_a_divergence(loss: float, sound: bool, message: str) -> None:
    with pytest.raises(DivergedError, match=message):
        FiniteCheck(_Trainer(sound), (1.0, 5)).check(5, {"training_loss": loss})


def test_the_weights_are_looked_at_once_where_the_loop_has_not() -> None:
    unknown, known, bad = _Trainer(None), _Trainer(True), _Trainer(None, finite=False)
    for trainer in (unknown, known, unknown):
        FiniteCheck(trainer, (1.0, 0)).require(5)
    assert (unknown.looks, known.looks) == (1, 0)
    with pytest.raises(DivergedError, match="a weight is not finite at step 5"):
        FiniteCheck(bad, (1.0, 0)).require(5)


def test_without_a_bound_anything_will_do() -> None:
    trainer = _Trainer(None, finite=False)
    free = FiniteCheck(trainer, None)
    free.check(5, {"training_loss": math.nan})
    free.require(5)
    assert (trainer.sound, trainer.looks) == (None, 0)


@pytest.mark.parametrize(
    ("logs", "loss"),
    [
        ({"training_loss": 2.0, "other": 9.0}, 2.0),
        ({"one": {"training_loss": 2.0, "error": 9.0}, "other": {"training_loss": 3.0}}, 3.0),
        ({"one": {"training_loss": math.inf}, "other": {"training_loss": 3.0}}, math.inf),
        ({"error": 9.0}, 0.0),
    ],
)
def test_of_the_losses_of_several_tasks_the_worst_one_counts(logs: dict[str, Any], loss: float) -> None:
    assert reported_loss(logs) == loss


def test_the_loss_of_one_task_above_the_bound_is_a_divergence() -> None:
    logs = {"one": {"training_loss": 0.5}, "other": {"training_loss": math.nan}}
    with pytest.raises(DivergedError, match="training_loss is nan at step 5"):
        FiniteCheck(_Trainer(True), (1.0, 5)).check(5, logs)
