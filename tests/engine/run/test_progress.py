"""Where a run is, and what is saved when time runs out."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import tensorflow as tf

from trainer_kit.run.progress import Phases, Progress
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.base_trainer import BaseTrainer, CustomParts
from trainer_kit.training.loops.intervals import LoopRange


class _Trainer(BaseTrainer):
    """Is at a step, has evaluated seven batches, and notes that its weights were put back."""

    custom_parts = CustomParts()

    def __init__(self, step: int, done: list[str]) -> None:
        self.global_step = tf.Variable(step)
        self.evaluated_batches = tf.Variable(7)
        self._done = done

    def train(self, num_steps: tf.Tensor) -> None:
        self.global_step.assign_add(int(num_steps))

    def evaluate(self, num_steps: tf.Tensor) -> None:
        self.evaluated_batches.assign_add(int(num_steps))

    def evaluation_batches(self) -> int | None:
        return 30

    def restore_trained_weights(self) -> None:
        self._done.append("weights back")


def _run(phase: str, step: int, saved: int) -> tuple[Progress, list[str]]:
    done: list[str] = []
    trainer = _Trainer(step, done)
    controller = SimpleNamespace(
        phase=phase,
        planned_loop=LoopRange(step, step + 5),
        checkpoint_manager=SimpleNamespace(saved_step=saved),
        run=SimpleNamespace(total_steps=100),
        save_checkpoint=lambda: done.append("save"),
        sync=lambda: done.append("sync"),
    )
    progress = Progress()
    progress.trainer = trainer
    progress.attach_controller(controller)
    return progress, done


def test_a_phase_ends_with_its_block_but_stays_after_an_error() -> None:
    phases = Phases(TimeLedger())
    phases_seen = []
    phases_seen.append(phases.now)

    with phases.during_run():
        phases_seen.append(phases.now)
        with phases.during("train"):
            phases_seen.append(phases.now)
        phases_seen.append(phases.now)

    assert [*phases_seen, phases.now] == ["start", "report", "train", "report", "end"]

    with pytest.raises(OSError), phases.during_run(), phases.during("save"):
        raise OSError

    assert phases.now == "save"


def test_the_time_of_each_phase_is_counted() -> None:
    ticks = iter(range(100))  # a second passes with each look at the clock
    phases = Phases(TimeLedger(lambda: float(next(ticks))))

    with phases.during_run(), phases.during("save"):
        pass

    account = phases.times.build_account()

    assert account.seconds["start"] == 1
    assert account.seconds["report"] == 2
    assert account.seconds["save"] == 1
    assert account.unaccounted_seconds == 2
    assert account.wall == 6


def test_the_activity_of_a_run_has_its_steps_and_batches() -> None:
    assert Progress().get_phase_and_step() == ("start", 0)
    assert Progress().describe_activity() == ("building the model", 0, 0, 0)
    assert Progress().find_total("evaluating") is None
    assert _run("evaluate", 5, 0)[0].describe_activity() == ("evaluating", 5, 5, 7)
    assert _run("evaluate", 5, 0)[0].find_total("evaluating") == 30
    assert _run("wait", 5, 0)[0].describe_activity() == ("", 5, 5, 7)
    assert _run("save", 5, 0)[0].find_total("saving") is None

    training, _ = _run("train", 5, 0)
    training.controller.run.total_steps = 20

    assert training.describe_activity() == (
        "compiling the training loop and running its first step",
        5,
        5,
        7,
    )

    training.trainer.global_step.assign_add(1)

    assert training.describe_activity() == ("training", 5, 6, 7)

    training.controller.planned_loop = LoopRange(6, 11)
    assert training.describe_activity() == ("training", 6, 6, 7)
    assert training.find_total("training") == 20


def test_a_batch_of_an_evaluation_is_progress_and_so_is_waiting() -> None:
    progress, _ = _run("evaluate", 5, 0)
    before = progress.get_progress_token()

    progress.trainer.evaluated_batches.assign_add(1)

    assert progress.get_progress_token() != before

    waiting, _ = _run("wait", 5, 0)
    assert waiting.get_progress_token() != waiting.get_progress_token()


@pytest.mark.parametrize(
    ("phase", "saved", "done"),
    [
        ("evaluate", 0, ["weights back", "save", "sync"]),
        ("report", 0, ["weights back", "save", "sync"]),
        ("evaluate", 5, ["weights back", "sync"]),
        ("train", 5, []),
        ("save", 0, []),
        ("start", -1, []),
        ("wait", 0, []),
    ],
)
def test_a_late_save_takes_place_between_loops_only(
    phase: str, saved: int, done: list[str]
) -> None:
    progress, did = _run(phase, 5, saved)

    assert progress.get_phase_and_step() == (phase, 5)
    assert progress.save_late() == bool(done)
    assert did == done


def test_inside_a_step_nothing_is_saved_and_a_warning_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress, done = _run("train", 5, 2)

    with caplog.at_level(logging.WARNING, "trainer_kit"):
        assert not progress.save_late()

    assert done == []
    assert "the steps after 2 are lost" in caplog.text
