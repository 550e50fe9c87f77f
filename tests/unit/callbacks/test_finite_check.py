"""When the loss or the weights of a run count as diverged."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainer_kit.callbacks.callback import Loop, Run
from trainer_kit.callbacks.finite_check import FiniteCheck
from trainer_kit.errors import DivergedError


def _check(trainer: _Trainer, step: int, logs: dict[str, Any]) -> None:
    run = Run(trainer)
    run.loop = Loop(step - 1, step, 1.0, logs)
    FiniteCheck(1.0, 5).boundary_begin(run, logs)


class _Trainer:
    """What is looked at of a trainer."""

    def __init__(self, weights_finite: bool | None, finite: bool = True) -> None:
        self.weights_finite = weights_finite
        self.state = self
        self.finite = finite
        self.looks = 0

    def weights_are_finite(self) -> bool:
        self.looks += 1
        return self.finite


@pytest.mark.parametrize(
    ("step", "loss", "sound"), [(4, 2.0, True), (5, 1.0, True), (5, 0.5, None)]
)
def test_a_loss_within_or_before_the_bound_is_accepted(step: int, loss: float, sound: Any) -> None:
    trainer = _Trainer(sound)

    _check(trainer, step, {"training_loss": loss})

    # nothing is looked at for it
    assert trainer.weights_finite == sound
    assert trainer.looks == 0


@pytest.mark.parametrize(
    ("loss", "sound", "message"),
    [
        (1.5, True, r"training_loss is 1.5 at step 5 \(trainer.loss_upper_bound is 1\)"),
        (math.nan, True, "training_loss is nan"),
        (0.5, False, "a weight is not finite at step 5"),
    ],
)
def test_a_loss_or_a_weight_that_is_not_sound_is_a_divergence(
    loss: float, sound: bool, message: str
) -> None:
    with pytest.raises(DivergedError, match=message):
        _check(_Trainer(sound), 5, {"training_loss": loss})


def test_the_weights_are_looked_at_once_where_the_loop_has_not() -> None:
    unchecked = _Trainer(None)
    checked = _Trainer(True)
    bad = _Trainer(None, finite=False)

    for trainer in (unchecked, checked, unchecked):
        FiniteCheck(1.0).checkpoint_begin(Run(trainer))

    assert unchecked.looks == 1
    assert checked.looks == 0

    run = Run(bad)
    run.step = 5

    with pytest.raises(DivergedError, match="a weight is not finite at step 5"):
        FiniteCheck(1.0).evaluation_begin(run)


@pytest.mark.parametrize("loss", [1.5, math.nan])
def test_the_loss_of_one_task_above_the_bound_is_a_divergence(loss: float) -> None:
    logs = {"one": {"training_loss": 0.5}, "other": {"training_loss": loss}}
    with pytest.raises(DivergedError, match=f"training_loss is {loss} at step 5"):
        _check(_Trainer(True), 5, logs)
