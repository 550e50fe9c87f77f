"""What a run of each mode trains, evaluates and returns; a counter stands for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import tensorflow as tf

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.config.modes import MODES
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.run.controller import Controller
from trainer_kit.run.runner import run_mode
from trainer_kit.testing import tiny_experiment
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.loops.iterators import StopFlag


class _Counter(BaseTrainer):
    """Counts steps; its score is that of the step, its best score is always 99."""

    def __init__(self, sets: Sequence[str]) -> None:
        self.global_step, self._sets = tf.Variable(0, dtype=tf.int64), tuple(sets)
        self.stop_flag = StopFlag(tf.distribute.get_strategy())
        self.evaluated: list[tuple[int, int]] = []  # (step, batches) of each evaluation

    @property
    def validation_sets(self) -> tuple[str, ...]:
        return self._sets

    def initialize(self) -> None:
        self.global_step.assign(1000)

    def train(self, num_steps: tf.Tensor) -> dict[str, Any]:
        self.global_step.assign_add(int(num_steps))
        return {"loss": tf.constant(1.0)}

    def evaluate(self, num_steps: tf.Tensor, sets: Sequence[str] = ("",)) -> dict[str, Any]:
        self.evaluated.append((int(self.global_step), int(num_steps)))
        score = {"score": float(self.global_step)}
        return score if "" in sets else dict.fromkeys(sets, score)

    def place_of_metric(self, metric: str) -> tuple[list[str], str]:
        return [] if "" in self._sets else ["dev"], "score"


class _Stopping(Callback):
    """Asks the trainer to stop after the first loop."""

    def loop_end(self, run: Run, logs: Any) -> None:
        run.trainer.request_stop()


class _Made:
    """A run of 8 steps in loops of 2, with an evaluation of 3 batches, and a checkpoint, every 4 steps."""

    def __init__(self, folder: Path, *sets: str, callbacks: Sequence[Callback] = (), trains: bool = True) -> None:
        self.folder, self.counter = folder, _Counter(sets or ("",))
        self.config = tiny_experiment(train_steps=8, validation_interval=4, validation_steps=3)
        ledger = Ledger(folder / "ledger.jsonl", dataset="d", config_hash="a", sets=dict.fromkeys(sets, "a"))
        metric = "dev|score" if sets else "score"
        exporter = SimpleNamespace(metric_name=metric, best_ckpt_logs={metric: 99.0})
        self.history = RunHistory(ledger, None, (), BestCheckpoints(exporter, {}))
        step = self.counter.global_step
        trainer = SavedTrainer(tf.train.Checkpoint(global_step=step), step)
        manager = manager_of(trainer, folder, max_to_keep=99, interval=4, asynchronous=False)
        self.controller = Controller(
            trainer=self.counter if trains else None, evaluator=self.counter, global_step=step, steps_per_loop=2,
            checkpoint_manager=manager, callbacks=CallbackList(Run(self.counter, str(folder)), callbacks),
            recorded=self.history.recorded_logs,
        )  # fmt: skip
        if trains:
            self.controller.restore_checkpoint()

    def run(self, mode: str, checkpoint: str = "", sidecar: Sidecar | None = None) -> dict[str, Any]:
        plan: Any = SimpleNamespace(mode=mode, config=self.config, checkpoint=checkpoint)
        return run_mode(plan, self.controller, self.history, sidecar)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The folder of a run that was trained."""
    made = _Made(tmp_path)
    made.run("train")
    assert made.counter.evaluated == []
    return tmp_path


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.single])
def test_each_mode_of_a_single_run_drives_the_controller(mode: str) -> None:
    controller = MagicMock()
    plan: Any = SimpleNamespace(mode=mode, config=tiny_experiment(), checkpoint="")
    run_mode(plan, controller, MagicMock(), MagicMock())
    assert controller.method_calls


@pytest.mark.parametrize(
    ("mode", "evaluated"),
    [("train", []), ("train_and_eval", [(4, 3), (8, 3)]), ("train_and_post_eval", [(8, 3)])],
)
def test_a_mode_that_trains_evaluates_when_it_says(tmp_path: Path, mode: str, evaluated: list[Any]) -> None:
    made = _Made(tmp_path)
    assert made.run(mode) == ({"score": 8.0} if evaluated else {})
    assert made.controller.run.step == 8 and made.counter.evaluated == evaluated


@pytest.mark.parametrize("mode", ["train_and_eval", "train_and_post_eval"])
def test_a_run_that_stops_has_no_last_evaluation(tmp_path: Path, mode: str) -> None:
    made = _Made(tmp_path, callbacks=[_Stopping()])
    made.history.ledger.append(2, {"score": 0.5}, 0.1)  # of a life before
    assert (made.run(mode), made.controller.run.step, made.counter.evaluated) == ({}, 2, [])


def test_an_evaluation_on_record_is_returned_with_the_best(trained: Path) -> None:
    made = _Made(trained)
    made.history.ledger.append(8, {"score": 0.5}, 0.1)
    assert made.run("train_and_eval") == {"score": 0.5, "best_score": 99.0}
    assert made.counter.evaluated == []


def test_sets_on_record_join_those_that_are_evaluated_now(trained: Path) -> None:
    made = _Made(trained, "dev", "test")
    made.history.ledger.append(8, {"dev": {"score": 0.5}}, {"dev": 0.1})
    logs = made.run("train_and_eval")
    assert logs == {"dev": {"score": 0.5, "best_score": 99.0}, "test": {"score": 8.0}}
    assert len(made.counter.evaluated) == 1


@pytest.mark.parametrize("left", [["dev"], ["dev", "test"]])
def test_a_set_that_the_config_has_no_more_is_not_returned(trained: Path, left: list[str]) -> None:
    before = _Made(trained, "dev", "old")
    for name in ("dev", "old"):
        before.history.ledger.append(8, {name: {"score": 0.5}}, {name: 0.1})
    assert list(_Made(trained, *left).run("train_and_eval")) == left


def test_eval_restores_the_checkpoint_that_it_evaluates(trained: Path) -> None:
    made = _Made(trained, trains=False)
    assert made.run("eval", str(trained / "ckpt-4")) == {"score": 4.0}
    assert made.counter.evaluated == [(4, 3)]


def test_eval_without_a_checkpoint_evaluates_initial_weights(trained: Path) -> None:
    assert _Made(trained, trains=False).run("eval") == {"score": 1000.0}


class _Curves:
    """Notes the steps that it was taken to."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def resume(self, step: int) -> None:
        self.steps.append(step)


def _sidecar(made: _Made, curves: _Curves) -> Sidecar:
    directory = RunDirectory(str(made.folder), made.config.trainer, "side")
    lease = Lease(directory.evals, "side", lambda: ("wait", 0), lambda: True)
    return Sidecar(directory, made.history.ledger, None, curves, lease, 8, lambda: made.controller.run.step)


@pytest.mark.parametrize(("policy", "steps"), [("all", [4, 8]), ("latest", [8])])
def test_a_sidecar_evaluates_the_checkpoints_of_its_policy(trained: Path, policy: str, steps: list[int]) -> None:
    made = _Made(trained, trains=False)
    made.config = made.config.replace(trainer={"continuous_eval": {"policy": policy}})
    assert made.run("continuous_eval", sidecar=_sidecar(made, _Curves())) == {"score": 8.0}
    assert made.counter.evaluated == [(step, 3) for step in steps]


def test_a_sidecar_with_nothing_new_returns_its_last_record(trained: Path) -> None:
    made, curves = _Made(trained, trains=False), _Curves()
    (trained / "final.json").write_text('{"step": 8, "mode": "train", "metrics": {}}')
    for step in (4, 8):
        made.history.ledger.append(step, {"score": step / 8}, 0.1)
    assert made.run("continuous_eval", sidecar=_sidecar(made, curves)) == {"score": 1.0}
    assert (made.counter.evaluated, curves.steps) == ([], [8])
