"""EvaluationState: marks of evaluations, requests, and what checkpoints contain of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.run.evaluation_state import EvaluationState, LastLogs, ungroup_single_set
from trainer_kit.training.base_trainer import BaseTrainer


class _History:
    """Has the recorded logs of step 8."""

    def get_recorded_logs(self, step: int) -> dict[str, Any]:
        return {"often": {"accuracy": 0.5}} if step == 8 else {}


class _States(BaseTrainer):
    """Stands for the checkpoints of a trainer: keeps the functions of each state."""

    def __init__(self) -> None:
        self.functions: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register_state(
        self, name: str, get_state: Callable[[], Any], restore_state: Callable[[Any], None]
    ) -> None:
        self.functions[name] = (get_state, restore_state)

    def train(self, num_steps: tf.Tensor) -> dict[str, Any]:
        return {}

    def evaluate(self, num_steps: tf.Tensor) -> dict[str, Any]:
        return {}


def _evaluations() -> EvaluationState:
    history: Any = _History()
    return EvaluationState(tf.distribute.get_strategy(), history)


def test_sets_are_evaluated_at_one_step() -> None:
    evaluations = _evaluations()
    evaluations.add_evaluated(["rare"], 8)
    assert evaluations.select_unevaluated(["often", "rare", "far"], 8) == ["often", "far"]
    assert evaluations.select_unevaluated(["often", "rare", "far"], 9) == ["often", "rare", "far"]


def test_a_rewind_forgets_evaluated_sets_but_no_recorded_ones() -> None:
    evaluations = _evaluations()
    evaluations.add_evaluated(["often", "rare"], 8)
    evaluations.forget_evaluated()
    assert evaluations.select_unevaluated(["often", "rare"], 8) == ["often", "rare"]
    recorded, _ = evaluations.adopt_recorded(8)
    assert recorded == {"often": {"accuracy": 0.5}}


def test_recorded_logs_are_announced_once() -> None:
    evaluations = _evaluations()
    recorded = {"often": {"accuracy": 0.5}}
    assert evaluations.adopt_recorded(8) == (recorded, recorded)
    assert evaluations.adopt_recorded(8) == (recorded, {})
    assert evaluations.select_unevaluated(["often", "rare"], 8) == ["rare"]


def test_an_evaluation_carries_out_requests() -> None:
    evaluations = _evaluations()
    evaluations.requested_sets |= {"often", "rare"}
    evaluations.add_evaluated(["rare"], 8)
    assert evaluations.requested_sets == {"often"}


def test_checkpoints_contain_what_is_announced_and_asked_for() -> None:
    trainer = _States()
    evaluations = _evaluations()
    evaluations.register_with(trainer)
    get_announced, _ = trainer.functions["evaluated"]
    get_requests, _ = trainer.functions["evaluations asked for"]
    assert (get_announced(), get_requests()) == (None, None)

    evaluations.add_evaluated(["often"], 8)
    evaluations.requested_sets |= {"rare", "far"}
    assert (get_announced(), get_requests()) == ({"often": 8}, ["far", "rare"])


def test_a_restore_replaces_what_is_announced_and_asked_for() -> None:
    trainer = _States()
    evaluations = _evaluations()
    evaluations.register_with(trainer)
    evaluations.requested_sets |= {"far"}

    _, restore_announced = trainer.functions["evaluated"]
    _, restore_requests = trainer.functions["evaluations asked for"]
    restore_announced({"often": 8})
    restore_requests(["rare"])
    assert evaluations.requested_sets == {"rare"}
    recorded = {"often": {"accuracy": 0.5}}
    assert evaluations.adopt_recorded(8) == (recorded, {})
    restore_announced(None)
    restore_requests(None)
    assert evaluations.adopt_recorded(8) == (recorded, recorded)
    assert evaluations.requested_sets == set()


def test_without_a_history_nothing_is_recorded() -> None:
    evaluations = EvaluationState(tf.distribute.get_strategy(), None)
    assert evaluations.adopt_recorded(8) == ({}, {})
    assert evaluations.select_unevaluated(["often"], 8) == ["often"]


def test_last_logs_join_the_sets_of_one_step() -> None:
    last_logs = LastLogs()
    last_logs.add({"often": 1}, 4)
    last_logs.add({"often": 2}, 8)
    last_logs.add({"rare": 3}, 8)
    last_logs.add({}, 12)
    assert (last_logs.logs, last_logs.step) == ({"often": 2, "rare": 3}, 8)


def test_the_logs_of_a_single_set_are_not_grouped() -> None:
    assert ungroup_single_set({"": {"accuracy": 0.5}}) == {"accuracy": 0.5}
    assert ungroup_single_set({"often": {"accuracy": 0.5}}) == {"often": {"accuracy": 0.5}}
