"""Going back after a divergence, beside Model Garden's; real checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from official.core import actions as theirs

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.compat.model_garden.actions import RecoveryAction, RecoveryCondition
from trainer_kit.errors import DivergedError, UsageError

NAN = math.nan


def _collect_answers(condition: Any, step: tf.Variable, losses: list[tuple[int, Any]]) -> list[Any]:
    """What the condition says of the loss at each step, up to the error, if there is one."""
    answers: list[Any] = []
    for number, loss in losses:
        step.assign(number)
        if callable(loss):  # no tensor exists while tests are collected
            loss = loss()
        try:
            answers.append(bool(condition({"training_loss": loss})))
        except RuntimeError:
            return [*answers, RuntimeError]
    return answers


@pytest.mark.parametrize(
    ("options", "losses"),
    [
        ({}, [(1, 0.4), (2, 0.6), (3, 0.5), (4, 0.7), (5, 0.8), (6, 0.9)]),
        (
            {},
            [
                (1, NAN),
                (2, 0.1),
                (3, lambda: tf.constant([NAN])),
                (4, lambda: tf.constant(NAN)),
                (5, NAN),
            ],
        ),
        ({"recovery_begin_steps": 3}, [(1, 9.0), (2, 9.0), (3, 9.0), (4, NAN), (5, 9.0), (6, 9.0)]),
        ({"recovery_begin_steps": 3}, [(1, NAN), (2, NAN), (2, NAN), (2, NAN)]),
        ({"recovery_max_trials": 0}, [(1, 0.1), (2, 0.6)]),
        ({"recovery_max_trials": 1}, [(1, NAN), (2, 0.1), (3, 0.6)]),
        ({"recovery_max_trials": -1}, [(1, NAN)]),
    ],
)
def test_the_decisions_are_theirs(options: dict[str, int], losses: list[tuple[int, Any]]) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    ours = _collect_answers(RecoveryCondition(step, 0.5, **options), step, losses)
    assert ours == _collect_answers(theirs.RecoveryCondition(step, 0.5, **options), step, losses)


@pytest.mark.parametrize("loss", [math.inf, -math.inf])
def test_an_infinite_loss_has_diverged_at_every_step(loss: float) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    options: dict[str, Any] = {
        "loss_upper_bound": math.inf,
        "recovery_begin_steps": 10,
        "recovery_max_trials": 1,
    }
    losses = [(1, loss), (2, loss)]

    our_answers = _collect_answers(RecoveryCondition(step, **options), step, losses)
    their_answers = _collect_answers(theirs.RecoveryCondition(step, **options), step, losses)

    assert our_answers == [True, RuntimeError]
    assert their_answers == [False, False]


def test_the_error_has_loss_and_step_and_is_a_divergence() -> None:
    condition = RecoveryCondition(tf.Variable(7), 0.5, recovery_max_trials=0)

    loss_and_step = r"training_loss is 0\.75 at step 7, and recovery_max_trials=0"
    with pytest.raises(DivergedError, match=rf"larger than the bound 0\.5.*{loss_and_step}"):
        condition({"training_loss": 0.75})
    message = r"The loss value is NaN .*training_loss is nan at step 7"
    with pytest.raises(RuntimeError, match=message):
        condition({"training_loss": NAN})
    assert condition.recover_counter == 2


def test_logs_without_a_training_loss_are_refused() -> None:
    with pytest.raises(UsageError, match="a training loop returned loss and no training_loss"):
        RecoveryCondition(tf.Variable(7), 0.5)({"loss": 0.1})


class _Run:
    """Weights and a step, with checkpoints of either manager."""

    def __init__(self, folder: Path, own: bool = False) -> None:
        self.step = tf.Variable(0, dtype=tf.int64)
        self.weights = tf.Variable([0.0, 0.0])
        self.checkpoint = tf.train.Checkpoint(global_step=self.step, weights=self.weights)
        self.initializations = 0
        if own:
            trainer = SavedTrainer(self.checkpoint, self.step, initialize=self._initialize)
            self.manager = manager_of(trainer, folder, max_to_keep=5, interval=10)
        else:
            self.manager = tf.train.CheckpointManager(
                self.checkpoint,
                str(folder),
                max_to_keep=5,
                step_counter=self.step,
                checkpoint_interval=10,
                init_fn=self._initialize,
            )

    def _initialize(self) -> None:
        self.initializations += 1

    def save(self, step: int, weights: list[float]) -> None:
        self.step.assign(step)
        self.weights.assign(weights)
        assert self.manager.save(checkpoint_number=step)
        if isinstance(self.manager, CheckpointManager):
            self.manager.sync()  # else it would still write when pytest has removed the folder

    def values(self) -> tuple[int, list[float]]:
        """Returns the step and the weights."""
        return int(self.step), self.weights.numpy().tolist()


@pytest.mark.parametrize("own", [False, True])
def test_the_newest_checkpoint_comes_back(tmp_path: Path, own: bool) -> None:
    run = _Run(tmp_path, own)
    run.manager.restore_or_initialize()
    run.save(10, [1.0, 1.0])
    run.save(20, [2.0, 2.0])
    run.step.assign(27)
    run.weights.assign([NAN, 3.0])

    RecoveryAction(run.manager)({})

    assert run.values() == (20, [2.0, 2.0])


def test_without_a_checkpoint_recovery_is_an_error(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.weights.assign([NAN, 3.0])

    theirs.RecoveryAction(run.manager)({})
    assert math.isnan(run.weights.numpy()[0])

    initializations = run.initializations
    with pytest.raises(DivergedError, match="has no checkpoint; save one before the first step"):
        RecoveryAction(run.manager)({})
    assert run.initializations == initializations
