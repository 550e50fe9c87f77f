"""The steps that a run has traced, and when the trace is there."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.traces import times_traced
from trainer_kit.callbacks.callback import Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.profile import Profile
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.base_trainer import CustomParts
from trainer_kit.training.trainer_creation import create_trainer


@pytest.fixture(scope="module")
def trainer() -> Any:
    config = tiny_experiment()
    trainer = create_trainer(config, TinyTask(config.task), True, False, None)
    trainer.initialize()

    return trainer


def _create_callbacks(trainer: Any, folder: Path, window: str, chief: bool = True) -> CallbackList:
    trainer.global_step.assign(0)
    return CallbackList(Run(trainer, str(folder), chief), [Profile(window, str(folder), 100)])


def _train(callbacks: CallbackList, steps: int) -> list[int]:
    """Trains in loops that end where the callbacks ask for it; returns their ends."""
    run = callbacks.run
    ends: list[int] = []
    end = run.step + steps
    while run.step < end:
        cut = min(end, callbacks.find_next_boundary(run.step) or end)
        callbacks.call("loop_begin", cut - run.step)
        logs = run.trainer.train(tf.constant(cut - run.step))
        ends.append(run.read_step())
        callbacks.call("loop_end", logs)

    return ends


def _count_profiles(folder: Path) -> int:
    return len(list(folder.glob("plugins/profile/*/*.xplane.pb")))


def test_the_trace_is_written_after_the_last_of_its_steps(tmp_path: Path, trainer: Any) -> None:
    callbacks = _create_callbacks(trainer, tmp_path, "2:4")

    with callbacks.call_begin_and_end("train"):
        assert _train(callbacks, 3) == [1, 3]
        assert _count_profiles(tmp_path) == 0
        assert _train(callbacks, 3) == [4, 6]
        assert _count_profiles(tmp_path) == 1

    assert times_traced(tmp_path, "SparseSoftmaxCrossEntropyWithLogits") == 3


def test_a_run_that_ends_inside_the_window_writes_its_trace(tmp_path: Path, trainer: Any) -> None:
    callbacks = _create_callbacks(trainer, tmp_path, "2:99")

    with pytest.raises(ZeroDivisionError), callbacks.call_begin_and_end("train"):
        _train(callbacks, 3)
        raise ZeroDivisionError

    assert _count_profiles(tmp_path) == 1


def test_a_run_that_goes_back_into_the_window_is_traced_once(tmp_path: Path, trainer: Any) -> None:
    callbacks = _create_callbacks(trainer, tmp_path, "2:4")

    with callbacks.call_begin_and_end("train"):
        _train(callbacks, 5)
        trainer.global_step.assign(1)
        callbacks.run.read_step()
        assert _train(callbacks, 4) == [4, 5]

    assert _count_profiles(tmp_path) == 1


def test_loops_around_the_window_end_where_they_did() -> None:
    profile = Profile("150:360", "", 100)

    boundaries = {step: profile.next_boundary(step) for step in (0, 149, 200, 300, 360, 400)}

    assert boundaries == {0: 149, 149: 200, 200: 300, 300: 360, 360: 400, 400: None}
    assert Profile("1:200", "", 100).next_boundary(0) == 100


@pytest.mark.parametrize(
    ("window", "step", "reason"),
    [("4:6", 6, "the run resumes from step 6"), ("40:60", 0, "the run ended before step 40")],
)
def test_a_run_outside_the_window_says_that_nothing_is_traced(
    window: str,
    step: int,
    reason: str,
    tmp_path: Path,
    trainer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="trainer_kit")
    callbacks = _create_callbacks(trainer, tmp_path, window)
    trainer.global_step.assign(step)
    callbacks.run.read_step()

    with callbacks.call_begin_and_end("train"):
        _train(callbacks, 3)

    assert _count_profiles(tmp_path) == 0
    assert caplog.messages == [f"profile={window}: no trace is written, since {reason}"]


def test_a_worker_that_is_not_the_chief_ends_its_loops_alike(tmp_path: Path, trainer: Any) -> None:
    callbacks = _create_callbacks(trainer, tmp_path, "2:3", chief=False)

    with callbacks.call_begin_and_end("train"):
        assert _train(callbacks, 4) == [1, 3, 4]

    assert _count_profiles(tmp_path) == 0


def test_a_profiler_that_cannot_start_or_write_is_a_warning(
    tmp_path: Path, trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tf.profiler.experimental.start(str(tmp_path / "other"))
    callbacks = _create_callbacks(trainer, tmp_path, "1:2")
    with callbacks.call_begin_and_end("train"):
        _train(callbacks, 3)

    tf.profiler.experimental.stop()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "plugins").touch()
    callbacks = _create_callbacks(trainer, tmp_path / "full", "1:2")

    with callbacks.call_begin_and_end("train"):
        _train(callbacks, 3)

    first, second = caplog.messages
    assert first == "no trace is written: AlreadyExistsError: Another profiler is running."
    assert f"the trace cannot be written in {tmp_path / 'full'}" in second


@pytest.mark.parametrize(("executor", "warns"), [("default", False), ("single_threaded", True)])
def test_a_profile_on_one_thread_warns(
    executor: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_experiment().replace(runtime={"executor": executor})
    trainer = SimpleNamespace(
        custom_parts=CustomParts(), config=config, global_step=tf.Variable(0, dtype=tf.int64)
    )

    callbacks = CallbackList(Run(trainer, str(tmp_path)), [Profile("1:2", str(tmp_path), 100)])

    with callbacks.call_begin_and_end("train"):
        assert ("the profile will show no TensorFlow operations" in caplog.text) is warns


def test_a_trainer_of_another_framework_is_traced(tmp_path: Path) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    other = SimpleNamespace(
        custom_parts=CustomParts(replaces_steps=True),
        global_step=step,
        train=lambda steps: {"step": step.assign_add(3)},
    )

    callbacks = CallbackList(Run(other, str(tmp_path)), [Profile("4:6", str(tmp_path), 100)])

    with callbacks.call_begin_and_end("train"):
        assert _train(callbacks, 9) == [3, 6, 9]

    assert _count_profiles(tmp_path) == 1
