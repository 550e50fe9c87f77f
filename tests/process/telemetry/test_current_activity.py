"""What a run is doing, when it takes long: what the watch sees, and what real runs with slow parts
print.
"""

from __future__ import annotations

import functools
import io
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from tests.unit.telemetry.test_console import screen
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig
from trainer_kit.run import runner
from trainer_kit.run.launcher import launch
from trainer_kit.run.runner import run_experiment
from trainer_kit.telemetry import console as console_module
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.current_activity import ActivityWatcher
from trainer_kit.telemetry.report import EVALUATING, TRAINING, Activity
from trainer_kit.testing import TinyConfig


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls and drawings that come often, so that what they show may be short."""
    monkeypatch.setattr(
        runner, "ActivityWatcher", functools.partial(ActivityWatcher, poll_seconds=0.02)
    )
    monkeypatch.setattr(console_module, "_DRAWINGS_PER_SECOND", 20)


@configclass
class SlowConfig(TinyConfig):
    """The tiny task."""


@register_task(SlowConfig)
class SlowTask(LinearTask):
    """Each batch of validation data takes its time."""

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        source = super().build_inputs(params, input_context)
        if params.is_training:
            return source
        dataset = source.at(0, input_context)

        def slowly(*batch: Any) -> Any:
            time.sleep(0.04)
            return batch

        def delay_batch(*batch: Any) -> Any:
            tensors = tf.py_function(slowly, batch, [tensor.dtype for tensor in batch])
            return tuple(
                tf.ensure_shape(tensor, spec.shape)
                for tensor, spec in zip(tensors, dataset.element_spec, strict=True)
            )

        slow = dataset.map(delay_batch)
        return slow.apply(tf.data.experimental.assert_cardinality(dataset.cardinality()))


def slow_experiment() -> ExperimentConfig:
    """Two evaluations of 13 batches, half a second each."""
    return linear_experiment(train_steps=10, validation_interval=5).replace(task=SlowConfig())


def _evaluate_to_lines(tmp_path: Path, config: ExperimentConfig) -> list[str]:
    """What an evaluation of the initial weights writes: a run would be traced for its training,
    too.
    """
    console = {"activity_after": 0.0, "activity_every": 0.1}
    return _run_to_text(tmp_path, config, "eval", checkpoint="initial", **console).splitlines()


def _run_to_text(
    tmp_path: Path, config: ExperimentConfig, mode: str, checkpoint: str = "latest", **console: Any
) -> str:
    stream = io.StringIO()
    writer = ConsoleWriter(stream, **console)
    launch(config, mode, str(tmp_path), checkpoint=checkpoint, console=writer)
    return stream.getvalue()


def test_a_long_evaluation_tells_now_and_then_how_far_it_is(tmp_path: Path) -> None:
    text = _run_to_text(
        tmp_path, slow_experiment(), "train_and_eval", activity_after=0.05, activity_every=0.1
    )

    lines = text.splitlines()
    kinds = [line.split(" | ")[0] for line in lines]
    kinds = [kind for kind in kinds if kind in ("train", "evaluating", "validation")]
    assert [kind for kind in kinds if kind != "evaluating"] == ["train", "validation"] * 2, lines
    # The first line of each evaluation may come before "train".
    first, second, rest = " ".join(kinds).split("validation")
    assert first.count("evaluating") >= 2, lines
    assert second.count("evaluating") >= 2, lines
    assert rest == "", lines

    pattern = r"evaluating \| step (5|10) \| batch (\d+)/13 \| 0:00:\d\d( \| 0:00:\d\d left)?"
    batches = []
    for line in lines:
        if line.startswith("evaluating"):
            match = re.fullmatch(pattern, line)
            assert match, line
            batches.append((int(match[1]), int(match[2])))
    assert batches == sorted(batches)
    assert any(0 < batch < 13 for _, batch in batches)


def test_a_part_of_the_validation_data_is_the_known_end(tmp_path: Path) -> None:
    lines = _evaluate_to_lines(tmp_path, slow_experiment().replace(trainer={"validation_steps": 9}))
    assert any(re.match(r"evaluating \| step 0 \| batch \d+/9 \| ", line) for line in lines), lines


def test_two_replicas_count_global_batches(tmp_path: Path) -> None:
    lines = _evaluate_to_lines(tmp_path, slow_experiment().replace(runtime={"virtual_cpus": 2}))
    assert any(re.match(r"evaluating \| step 0 \| batch \d+/13 \| ", line) for line in lines), lines


def test_a_terminal_redraws_one_line_and_removes_it_at_the_end(tmp_path: Path) -> None:
    text = _run_to_text(
        tmp_path, slow_experiment(), "train_and_eval", interactive=True, activity_after=0.05
    )

    assert len(set(re.findall(r"evaluating \| step 5 \| batch \d+/13", text))) > 2
    lines = screen(text)
    steps = [line.split(" | ")[1] for line in lines if line.startswith("validation")]
    assert steps == ["step 5/10", "step 10/10"]
    assert sum(line.startswith("train") for line in lines) == 1
    assert not any("evaluating" in line for line in lines), lines


class Activities:
    """A run with one activity at each look, all of the same length."""

    def __init__(self, looks: list[tuple[str, int, int, int]]) -> None:
        self._looks = iter(looks)

    def describe_activity(self) -> tuple[str, int, int, int]:
        return next(self._looks)

    def find_total(self, activity: str) -> int | None:
        return 20 if activity in (EVALUATING, TRAINING) else None


def test_each_evaluation_is_counted_from_its_own_start() -> None:
    looks = [
        ("", 10, 10, 40),
        (EVALUATING, 10, 10, 43),
        (EVALUATING, 10, 10, 50),
        (EVALUATING, 20, 20, 62),
        ("", 20, 20, 70),
        (EVALUATING, 20, 20, 71),
    ]
    now = 0.0
    activities: list[Activity | None] = []
    watcher = ActivityWatcher(Activities(looks), activities.append, clock=lambda: now)

    for _ in looks:
        watcher.poll()
        now += 1.0

    assert activities == [
        Activity(EVALUATING, 10, 3, 20, 0.0),
        Activity(EVALUATING, 10, 10, 20, 1.0),
        None,
        Activity(EVALUATING, 20, 0, 20, 0.0),
        None,
        Activity(EVALUATING, 20, 1, 20, 0.0),
    ]


def test_each_training_loop_is_timed_from_its_own_start() -> None:
    looks = [
        ("building the model", 0, 0, 0),
        (TRAINING, 5, 7, 0),
        (TRAINING, 5, 8, 0),
        (TRAINING, 10, 10, 0),
    ]
    activities: list[Activity | None] = []
    watcher = ActivityWatcher(Activities(looks), activities.append, clock=lambda: 0.0)

    for _ in range(4):
        watcher.poll()

    assert activities == [
        Activity("building the model", 0, 0, None, 0.0),
        None,
        Activity(TRAINING, 7, 2, 20, 0.0),
        Activity(TRAINING, 8, 3, 20, 0.0),
        None,
        Activity(TRAINING, 10, 0, 20, 0.0),
    ]


class _SlowlyBuiltTask(LinearTask):
    """Takes its time to build the model, and for each training step."""

    def build_model(self) -> Any:
        time.sleep(0.3)
        return super().build_model()

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        loss = super().build_losses(labels, model_outputs, aux_losses)

        def slowly(value: tf.Tensor) -> tf.Tensor:
            time.sleep(0.15)
            return value

        late_loss = tf.py_function(slowly, [tf.stop_gradient(loss)], tf.float32)
        return loss + 0.0 * tf.ensure_shape(late_loss, [])


def test_slow_building_and_steps_are_shown_in_the_first_loop(tmp_path: Path) -> None:
    config = linear_experiment(train_steps=5)
    stream = io.StringIO()
    console = ConsoleWriter(stream, interactive=True, activity_after=0.05, activity_every=0.1)

    run_experiment(
        None, _SlowlyBuiltTask(config.task), "train", config, str(tmp_path), console=console
    )

    text = stream.getvalue()
    before_the_report = text[: text.index("training_loss")]
    assert "building the model | 0:00:0" in before_the_report
    assert re.search(r"training \| step [1-4]/5 \| 0:00:0\d", before_the_report), text
    assert not any("training |" in line for line in screen(text))


def test_an_error_of_the_watch_is_told_once_and_harms_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(progress: Activity | None) -> None:
        raise OSError("gone")

    activities = Activities([(EVALUATING, 1, 1, 1)])
    with caplog.at_level(logging.WARNING), ActivityWatcher(activities, fail, 0.01):
        time.sleep(0.1)
    message = "the run's current activity is no longer shown: OSError('gone')"
    assert caplog.messages == [message]
