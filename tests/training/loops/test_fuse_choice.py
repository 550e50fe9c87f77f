"""trainer.fuse_steps=auto: what is chosen, and that choosing changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import DataError
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.loops.fuse_choice import choose_fuse_steps, largest_stack
from trainer_kit.training.trainer import Trainer


class _PythonTask(TinyTask):
    """A task whose step runs Python, which XLA does not."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """Returns the loss, by way of Python."""
        loss = super().build_losses(labels, model_outputs, aux_losses)
        return loss + 0 * tf.ensure_shape(tf.py_function(lambda: 1.0, [], tf.float32), [])


def _trainer(
    config: ExperimentConfig,
    task_type: type[TinyTask] = TinyTask,
    trainer_type: type[Trainer] = Trainer,
    **arguments: Any,
) -> Trainer:
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    task = task_type(config.task)
    optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime)
    return trainer_type(config, task, task.build_model(), optimizer, **arguments)


def _config() -> ExperimentConfig:
    return tiny_experiment(fuse_steps="auto").replace(task={"dropout": 0.3})


def _values(trainer: Trainer) -> dict[str, Any]:
    saved = tf.train.TrackableView(trainer.checkpoint).descendants()
    variables = [item for item in saved if isinstance(item, tf.Variable)]
    return {f"{number} {v.name}": v.numpy() for number, v in enumerate([*variables, *trainer.metric_variables()])}


@pytest.mark.parametrize(
    ("steps_per_loop", "batch_bytes", "stack"),
    [(1000, 100, 100), (96, 100, 96), (150, 100, 75), (97, 100, 97), (101, 100, 1), (1000, 2**23, 10), (8, 2**40, 1)],
)
def test_a_stack_divides_a_loop_and_fits_into_memory(steps_per_loop: int, batch_bytes: int, stack: int) -> None:
    assert largest_stack(steps_per_loop, batch_bytes) == stack


def test_timing_leaves_state_and_data_as_they_were() -> None:
    timed, other = _trainer(_config()), _trainer(_config())
    for trainer in (timed, other):
        trainer.train(tf.constant(3))
    before = _values(timed)
    choice = choose_fuse_steps(timed)
    assert choice is not None
    assert choice.fuse_steps in (1, 5)
    assert "5 steps in one program of XLA run at" in choice.reason
    for name, value in _values(timed).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    logs = [trainer.train(tf.constant(4)) for trainer in (timed, other)]
    assert logs[0] == logs[1]
    for one, another in zip(timed.model.get_weights(), other.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, another)


def test_a_stop_ends_the_timing_without_a_choice() -> None:
    trainer = _trainer(_config(), _PythonTask)
    trainer.request_stop()
    assert choose_fuse_steps(trainer) is None


def test_a_step_that_xla_cannot_compile_stays_as_it_is() -> None:
    choice = choose_fuse_steps(_trainer(_config(), _PythonTask))
    assert choice is not None
    assert choice.fuse_steps == 1
    assert "XLA cannot compile the training step: it uses tf.py_function" in choice.reason


class _SummaryTask(TinyTask):
    """A task whose step writes a summary, which XLA does not."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """Returns the loss, and writes it."""
        loss = super().build_losses(labels, model_outputs, aux_losses)
        tf.summary.scalar("own", loss, step=0)
        return loss


def test_a_step_that_writes_summaries_stays_as_it_is_and_writes_them_in_the_run(tmp_path: Path) -> None:
    trainer, writer = _trainer(_config(), _SummaryTask), tf.summary.create_file_writer(str(tmp_path))
    choice = choose_fuse_steps(trainer, writer)
    assert choice is not None
    assert choice.fuse_steps == 1
    assert re.fullmatch(r"XLA cannot compile the training step: it writes a tf.summary \(.*\)", choice.reason)
    with writer.as_default():
        trainer.train(tf.constant(2))
    writer.flush()
    assert sum(b"own" in path.read_bytes() for path in tmp_path.iterdir()) == 1


class _EmptyTask(TinyTask):
    """A task whose data holds no batch, which tells only when it is read."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns none of the points."""
        return super().build_inputs(params, input_context).at(0).take(3).filter(lambda *batch: False)


def test_data_without_a_batch_is_told_of_by_the_run_and_not_by_the_timing() -> None:
    trainer = _trainer(_config(), _EmptyTask)
    assert choose_fuse_steps(trainer) is None
    with pytest.raises(DataError, match=r"task\.train_data has no batch"):
        trainer.train(tf.constant(2))


class _GreedyTrainer(Trainer):
    """Takes several batches for a step."""

    def next_train_inputs(self, iterator: Any) -> Any:
        """Returns the last of two batches."""
        next(iterator)
        return next(iterator)


class _LoopingTrainer(Trainer):
    """Takes several batches for a step, in a loop in graph."""

    def next_train_inputs(self, iterator: Any) -> Any:
        """Returns the last of three batches."""
        more = lambda number, _: (number + 1, next(iterator))  # noqa: E731
        return tf.while_loop(lambda number, _: number < 2, more, (0, next(iterator)))[1]


@pytest.mark.parametrize("kind", [_GreedyTrainer, _LoopingTrainer])
def test_steps_that_take_several_batches_stay_as_they_are(kind: type[Trainer]) -> None:
    trainer = _trainer(_config(), trainer_type=kind)
    choice = choose_fuse_steps(trainer)
    assert choice is not None
    assert (choice.fuse_steps, "takes more than one batch" in choice.reason) == (1, True)


def test_eager_functions_are_not_fused_and_a_config_that_asks_for_both_is_refused() -> None:
    choice = choose_fuse_steps(_trainer(_config().replace(runtime={"run_eagerly": True})))
    assert choice is not None
    assert (choice.fuse_steps, choice.reason) == (1, "runtime.run_eagerly is true")
    with pytest.raises(ValueError, match=r"5 fuses steps of a graph; set runtime\.run_eagerly=false"):
        tiny_experiment(fuse_steps=5).replace(runtime={"run_eagerly": True})


class _SameTask(TinyTask):
    """A task whose data is one dataset for good."""

    _data = None

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the points; the same object each time."""
        self._data = self._data or super().build_inputs(params, input_context).at(0)
        return self._data


def test_a_dataset_that_is_the_same_each_time_is_not_begun_twice() -> None:
    choice = choose_fuse_steps(_trainer(_config(), _SameTask))
    assert choice is not None
    assert choice.fuse_steps == 1
    assert "the same dataset each time" in choice.reason


def test_data_that_cannot_be_begun_twice_is_not_timed() -> None:
    dataset = tf.data.Dataset.range(3)
    choice = choose_fuse_steps(_trainer(_config(), train_dataset=dataset))
    assert choice is not None
    assert (choice.fuse_steps, choice.reason) == (1, "a ready-made dataset would be begun twice")
