"""Errors of a loop on one thread name the operation that failed, as those of the default executor do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import DataError
from trainer_kit.errors.user_frames import user_frames
from trainer_kit.training.loops.last_batch import UNNAMED
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import create_trainer

BAD = 20  # the number of the example that cannot be used


class _Numbered(LinearTask):
    """Examples that are numbered from 0, in batches of 4."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        labels = tf.data.Dataset.range(40)
        return labels.map(lambda number: (tf.ones([8]), number % 3, number)).batch(4)

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        features, labels, numbers = inputs
        return super().train_step((features * self.factor(numbers), labels), model, optimizer, metrics)

    def factor(self, numbers: Any) -> Any:
        """Returns a factor for each example, [batch, 1]."""
        return tf.ones_like(numbers, tf.float32)[:, None]


class _GathersTooFar(_Numbered):
    def factor(self, numbers: Any) -> Any:
        return tf.gather(tf.ones([BAD, 1]), numbers)  # the line that fails


class _CannotRead(_Numbered):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        refuse = lambda *parts: (tf.debugging.assert_less(parts[2], np.int64(BAD)), parts)[1]  # noqa: E731
        return super().build_inputs(params, input_context).unbatch().map(refuse).batch(4)


class _FailsOnce(_Numbered):
    def factor(self, numbers: Any) -> Any:
        if not hasattr(self, "tries"):
            self.tries = tf.Variable(0, trainable=False)
        tf.debugging.assert_none_equal(self.tries.assign_add(1), 3)
        return super().factor(numbers)


class _Ragged(_Numbered):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        lengths = lambda features, labels, numbers: (features, labels, tf.ragged.range(numbers))  # noqa: E731
        return super().build_inputs(params, input_context).map(lengths)

    def factor(self, numbers: Any) -> Any:
        return tf.gather(tf.ones([BAD, 1]), numbers.row_lengths())  # the line that fails


class _TableTooShort(_Numbered):
    """A table by the number of the step, which does not depend on the batch."""

    def factor(self, numbers: Any) -> Any:
        if not hasattr(self, "steps"):
            self.steps = tf.Variable(0, trainable=False)
        factor = tf.gather(tf.ones([BAD // 4]), self.steps)  # the line that fails
        self.steps.assign_add(1)
        return factor


class _FailsBeforeItsBatch(Trainer):
    def next_train_inputs(self, iterator: Any) -> Any:
        tf.debugging.check_numerics(1 / tf.cast(self.global_step, tf.float32), "the first step has the number 0")
        return next(iterator)


class _ReadsInAFunction(Trainer):
    def next_train_inputs(self, iterator: Any) -> Any:
        tf.function(lambda: next(iterator))()
        return next(iterator)


class _Branches(Trainer):
    def train_step(self, iterator: Any) -> None:
        if self.global_step > 1000:
            self.global_step.assign(0)
        super().train_step(iterator)


class _TwoBatches(Trainer):
    def next_train_inputs(self, iterator: Any) -> Any:
        next(iterator)
        return next(iterator)


def _trainer(task: type[LinearTask], kind: type[Trainer] = Trainer, executor: str = "auto") -> Any:
    config = linear_experiment().replace(runtime={"executor": executor}, task={"train_data": {"global_batch_size": 4}})
    made = task(config.task)
    trainer = (
        create_trainer(config, made, True, False, None) if kind is Trainer else kind.create(config, made, True, False)
    )
    trainer.initialize()
    return trainer


def test_an_error_on_one_thread_names_the_users_line() -> None:
    trainer = _trainer(_Ragged)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        trainer.train(tf.constant(10))
    assert trainer.executor == "single_threaded"
    assert "the line that fails" in user_frames(error.value)[-1].code
    assert int(trainer.global_step.numpy()) in (BAD // 4, BAD // 4 + 1)  # the step that failed may have counted itself


def test_an_error_without_the_batch_is_none_of_the_data() -> None:
    """No operation that can fail runs while a step waits for its batch, so that an error is one of the step."""
    trainer = _trainer(_TableTooShort)
    trainer.train(tf.constant(2))
    functions = trainer.current_loop.newest_graph.as_graph_def().library.function
    body = next(one.node_def for one in functions if any(node.op == "IteratorGetNext" for node in one.node_def))
    after = {node.name for node in body if node.op == "IteratorGetNext"}
    for _ in body:
        after |= {node.name for node in body if any(re.sub("[:].*|^\\^", "", name) in after for name in node.input)}
    assert any(node.op == "GatherV2" for node in body)
    assert all(node.name in after for node in body if node.op in ("GatherV2", "ResourceGather"))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        trainer.train(tf.constant(8))
    assert trainer.executor == "single_threaded"
    assert "the line that fails" in user_frames(error.value)[-1].code


def test_an_error_before_the_first_batch_is_none_of_the_data() -> None:
    trainer = _trainer(_Numbered, _FailsBeforeItsBatch, executor="single_threaded")
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        trainer.train(tf.constant(10))
    assert UNNAMED in error.value.__notes__


def test_the_repeated_step_is_converted_as_that_of_the_loop() -> None:
    trainer = _trainer(_GathersTooFar, _Branches, executor="single_threaded")
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        trainer.train(tf.constant(10))
    assert "the line that fails" in user_frames(error.value)[-1].code


def test_unreadable_data_on_one_thread_are_a_data_error() -> None:
    trainer = _trainer(_CannotRead)
    with pytest.raises(DataError, match="the data cannot be read"):
        trainer.train(tf.constant(10))
    assert (trainer.executor, int(trainer.global_step.numpy())) == ("single_threaded", BAD // 4)


def test_an_error_that_does_not_come_again_gets_a_note() -> None:
    trainer = _trainer(_FailsOnce, executor="single_threaded")  # auto would not choose it for a step with a branch
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        trainer.train(tf.constant(10))
    assert UNNAMED in error.value.__notes__


@pytest.mark.parametrize("kind", [_TwoBatches, _ReadsInAFunction])
def test_a_step_of_two_batches_runs_by_default(kind: type[Trainer]) -> None:
    trainer = _trainer(_Numbered, kind)
    trainer.train(tf.constant(2))
    assert trainer.executor == "default"


def test_the_kept_batch_is_in_no_checkpoint(tmp_path: Path) -> None:
    names = {}
    for executor in ("default", "single_threaded"):
        trainer = _trainer(_Numbered, executor=executor)
        trainer.train(tf.constant(2))
        assert trainer.executor == executor
        trainer.before_save(str(tmp_path / executor))
        names[executor] = tf.train.list_variables(trainer.checkpoint.write(str(tmp_path / f"{executor}-state")))
    assert names["single_threaded"] == names["default"]
