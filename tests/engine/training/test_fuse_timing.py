"""Timing of fused steps: what is timed, and why the steps of some experiments cannot be fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import DataError
from trainer_kit.training import fuse_timing
from trainer_kit.training.fuse_timing import CannotFuseError, FuseTimer, largest_stack
from trainer_kit.training.trainer import Trainer


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Short timings, and a writer for the summaries of training steps."""
    monkeypatch.setattr(fuse_timing, "_SECONDS", 0.01)
    keras.utils.clear_session()
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        yield


def _creator(
    task_type: type[LinearTask] = LinearTask,
    trainer_type: type[Trainer] = Trainer,
    config: ExperimentConfig | None = None,
) -> Callable[[int], Any]:
    whole = config or linear_experiment()

    def create(fuse_steps: int) -> Any:
        chosen = whole.replace(trainer={"fuse_steps": fuse_steps})
        return trainer_type.create(chosen, task_type(chosen.task), True, False)

    return create


@pytest.mark.parametrize(
    ("steps_per_loop", "batch_bytes", "stack"),
    [(1000, 100, 100), (96, 100, 96), (150, 100, 75), (97, 100, 97), (101, 100, 1), (1000, 2**23, 10), (8, 2**40, 1)],
)
def test_a_stack_divides_a_loop_and_fits_into_memory(steps_per_loop: int, batch_bytes: int, stack: int) -> None:
    assert largest_stack(steps_per_loop, batch_bytes) == stack


def test_both_forms_are_trained_in_turn_and_their_rates_returned() -> None:
    made: dict[int, Trainer] = {}

    def create(fuse_steps: int) -> Any:
        made[fuse_steps] = _creator()(fuse_steps)
        return made[fuse_steps]

    timer = FuseTimer(create)
    timing = timer.time(timer.candidate())
    assert timing.fuse_steps == 5
    assert made.keys() == {1, 5}
    assert all(int(trainer.global_step) >= 5 * 2 * 5 for trainer in made.values())  # rounds, loops, steps
    assert min(timing.gain, timing.fused_rate, timing.separate_rate) > 0


class _PythonTask(LinearTask):
    """A task whose step runs Python, which XLA does not."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """Returns the loss, by way of Python."""
        loss = super().build_losses(labels, model_outputs, aux_losses)
        return loss + 0 * tf.ensure_shape(tf.py_function(lambda: 1.0, [], tf.float32), [])


class _SummaryTask(LinearTask):
    """A task whose step writes a summary, which XLA does not."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """Returns the loss, and writes it."""
        loss = super().build_losses(labels, model_outputs, aux_losses)
        tf.summary.scalar("own", loss)
        return loss


class _GreedyTrainer(Trainer):
    """Takes two batches for a step."""

    def next_train_inputs(self, iterator: Any) -> Any:
        """Returns the last of two batches."""
        next(iterator)
        return next(iterator)


@pytest.fixture(scope="module")
def separate() -> Any:
    """A trainer of separate steps."""
    return _creator()(1)


@pytest.mark.parametrize(
    ("task_type", "trainer_type", "reason"),
    [
        (_PythonTask, Trainer, r"XLA cannot compile the training step: it uses tf\.py_function"),
        (_SummaryTask, Trainer, r"XLA cannot compile the training step: it writes a tf\.summary"),
        (LinearTask, _GreedyTrainer, "takes more than one batch"),
    ],
)
def test_a_step_that_xla_refuses_is_told_with_the_reason(
    separate: Any, task_type: type[LinearTask], trainer_type: type[Trainer], reason: str
) -> None:
    create = _creator(task_type, trainer_type)
    timer = FuseTimer(lambda fuse_steps: create(fuse_steps) if fuse_steps > 1 else separate)
    with pytest.raises(CannotFuseError, match=reason):
        timer.time(5)


class _TextTask(LinearTask):
    """A task whose batches hold text."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns texts."""
        return tf.data.Dataset.from_tensors(["a", "b"]).repeat()


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (_creator(config=linear_experiment().replace(runtime={"run_eagerly": True})), r"runtime\.run_eagerly is true"),
        (_creator(config=linear_experiment(train_tf_while_loop=False)), r"trainer\.train_tf_while_loop is false"),
        (_creator(_TextTask), "string tensors"),
    ],
)
def test_what_is_known_before_a_step_is_told_before_a_step(create: Callable[[int], Any], reason: str) -> None:
    with pytest.raises(CannotFuseError, match=reason):
        FuseTimer(create)


def test_a_large_prime_steps_per_loop_has_no_candidate() -> None:
    timer = FuseTimer(_creator(config=linear_experiment(steps_per_loop=101, summary_interval=101)))
    with pytest.raises(CannotFuseError, match=r"no number from 2 to 100 divides trainer\.steps_per_loop=101"):
        timer.candidate()


class _ShortTask(LinearTask):
    """A task with few training batches."""

    batches = 7

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the points of a few batches."""
        return super().build_inputs(params, input_context).at(0).take(self.batches)


class _EmptyTask(_ShortTask):
    """A task without a training batch."""

    batches = 0


def test_data_that_ends_or_is_empty_is_told() -> None:
    with pytest.raises(DataError, match=r"task\.train_data ended after 7 steps.*; repeat the data"):
        FuseTimer(_creator(_ShortTask)).time(5)
    with pytest.raises(DataError, match=r"task\.train_data has no batch"):
        FuseTimer(_creator(_EmptyTask))
