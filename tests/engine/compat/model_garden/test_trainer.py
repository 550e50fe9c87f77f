"""Our Trainer for tasks of Model Garden, beside theirs: what it is made of, what it evaluates, what
gin binds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gin
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from official.core import base_trainer, config_definitions, task_factory
from official.core import train_utils as theirs
from official.utils.testing import mock_task

from tests.builders import replicas
from tests.engine.compat.model_garden.garden_task import (
    BATCH,
    FEATURES,
    SmallTask,
    begun,
    bits,
    eagerly,
    full_precision,
    small_config,
    small_trainer,
)
from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.garden_trainer import Trainer, create_trainer
from trainer_kit.compat.model_garden.trainer_adapter import TrainerAdapter
from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.training import trainer_creation

AVERAGING: dict[str, Any] = {
    "optimizer": {"type": "adam"},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.05}},
    "ema": {"average_decay": 0.9},
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    gin.clear_config()
    full_precision()


def _their_trainer(config: Any) -> Any:
    task = task_factory.get_task(config.task)
    return theirs.create_trainer(config, task, train=True, evaluate=True)


def _weights(trainer: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in trainer.model.trainable_variables]


def _floats(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if not name.startswith("best")}


def test_a_config_of_theirs_or_of_ours_trains_as_theirs_does() -> None:
    config = small_config(optimizer={"type": "adam"})
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        other = _their_trainer(config)
    with eagerly():
        expected, expected_evaluation = (
            other.train(tf.constant(3)),
            _floats(other.evaluate(tf.constant(-1))),
        )
    for ours, how in ((False, contextlib.nullcontext), (True, eagerly)):
        trainer = small_trainer(config, ours=ours)
        assert type(trainer) is Trainer and trainer.can_train
        assert trainer.config.task is (trainer.task.task_config if ours else config.task)
        assert trainer.config.trainer == convert(config).trainer
        with how():
            assert _floats(trainer.train(tf.constant(3))) == pytest.approx(
                _floats(expected), rel=1e-5
            )
            for one, two in zip(_weights(trainer), _weights(other), strict=True):
                np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)
            assert _floats(trainer.evaluate(tf.constant(-1))) == pytest.approx(
                expected_evaluation, rel=1e-5
            )


@pytest.fixture
def eager() -> Iterator[None]:
    with eagerly():
        yield


@pytest.mark.usefixtures("eager")
def test_an_evaluator_uses_the_averages_of_both_checkpoints(tmp_path: Path) -> None:
    config = small_config(**AVERAGING)
    config.trainer.override({"best_checkpoint_eval_metric": "accuracy", "checkpoint_interval": 1})
    directory = RunDirectory(str(tmp_path), convert(config).trainer)
    exporter = trainer_creation.create_exporter(convert(config), directory)
    trained = small_trainer(config, strategy=replicas(2), checkpoint_exporter=exporter)
    manager = begun(trained, config, tmp_path)
    trained.train(tf.constant(2))
    manager.save()
    expected = _floats(trained.evaluate(tf.constant(2)))

    plain = small_trainer(small_config(), train=False)
    for weights, same in (
        (trained.optimizer._average_weights, True),
        (trained.model.trainable_variables, False),
    ):
        for variable, value in zip(plain.model.trainable_variables, weights, strict=True):
            variable.assign(value.numpy())
        assert (_floats(plain.evaluate(tf.constant(2))) == pytest.approx(expected)) == same

    evaluator = small_trainer(small_config(**AVERAGING), train=False, strategy=replicas(2))
    for folder in (tmp_path, tmp_path / "best_ckpt"):
        path, is_best = tf.train.latest_checkpoint(str(folder)), folder != tmp_path
        assert (
            any(name.startswith("optimizer") for name in CheckpointGraph(path).shapes_by_name())
            != is_best
        )
        with evaluator.strategy.scope():
            evaluator.state.restore_weights(path)
        before = bits(evaluator.model.variables)
        assert (
            bits(trained.model.variables) == before
        ) != is_best  # the best has the averages in the model's place
        assert _floats(evaluator.evaluate(tf.constant(2))) == pytest.approx(expected)
        assert bits(evaluator.model.variables) == before and evaluator.global_step.numpy() == 2


class _Failing(Trainer):
    """Raises in the second evaluation, when the averages are in place."""

    def eval_end(self, aggregated_logs: Any = None) -> Any:
        self.evaluations = getattr(self, "evaluations", 0) + 1
        if self.evaluations == 2:
            assert self._average.active_average
            raise RuntimeError("out of memory")
        return super().eval_end(aggregated_logs)


@pytest.mark.usefixtures("eager")
def test_the_weights_come_back_when_an_evaluation_raises() -> None:
    trainer = small_trainer(small_config(**AVERAGING), trainer_cls=_Failing)
    trainer.train(tf.constant(3))
    held = [*trainer.model.variables, *trainer.optimizer._average_weights]
    before, first = bits(held), trainer.evaluate(tf.constant(-1))
    assert bits(held) == before
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.evaluate(tf.constant(-1))
    assert bits(held) == before
    assert trainer.evaluate(tf.constant(-1)) == first


class MyTrainer(Trainer):
    """What a gin file names."""


gin.external_configurable(MyTrainer, module="tests.door")


@pytest.mark.parametrize(
    "binding",
    [
        "create_trainer.trainer_cls = @MyTrainer",
        "train_utils.create_trainer.trainer_cls = @tests.door.MyTrainer",
        "official.core.train_utils.create_trainer.trainer_cls = @MyTrainer",
    ],
)
def test_gin_chooses_the_trainer_by_short_or_whole_name(binding: str) -> None:
    gin.parse_config(binding)
    config = convert(small_config())
    assert isinstance(
        trainer_creation.create_trainer(config, lookup_task_class(config.task)(config.task)),
        MyTrainer,
    )
    passed = create_trainer(config, SmallTask(small_config().task), True, True, trainer_cls=Trainer)
    assert type(passed) is Trainer  # what is passed wins


@gin.configurable(module="tests.door")
def my_data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(
        (tf.ones([BATCH, FEATURES]), tf.zeros([BATCH], tf.int32))
    ).repeat()


class _OwnOptimizer(SmallTask):
    @staticmethod
    def create_optimizer(optimizer_config: Any, runtime_config: Any = None) -> Any:
        return tf_keras.optimizers.SGD(0.1)


@pytest.mark.usefixtures("eager")
def test_a_task_may_have_a_static_optimizer_and_no_section() -> None:
    config = small_config()
    assert create_trainer(config, _OwnOptimizer(config.task), True, False).optimizer.name == "SGD"
    task = mock_task.MockTask()
    given = config_definitions.ExperimentConfig(trainer=config.trainer)
    optimizer = task.create_optimizer(config.trainer.optimizer_config)
    assert "training_loss" in Trainer(
        given, task, model=task.build_model(), optimizer=optimizer
    ).train(tf.constant(2))


def test_what_gin_binds_of_their_trainer_counts_for_ours() -> None:
    gin.parse_config("official.core.base_trainer.Trainer.train_dataset = @tests.door.my_data()")
    config = small_config()
    trainer = create_trainer(config, task_factory.get_task(config.task), train=True, evaluate=True)
    features, labels = next(iter(trainer.train_dataset))
    assert features.shape == [BATCH, FEATURES] and not labels.numpy().any()


def test_a_model_garden_trainer_chosen_by_gin_is_run() -> None:
    gin.parse_config("create_trainer.trainer_cls = @official.core.base_trainer.Trainer")
    converted = convert(small_config())
    made = trainer_creation.create_trainer(
        converted, lookup_task_class(converted.task)(converted.task)
    )
    assert isinstance(made, TrainerAdapter) and isinstance(made._inner, base_trainer.Trainer)
    assert int(made.global_step) == 0


class _Aggregating(SmallTask):
    def aggregate_logs(self, state: Any, step_outputs: Any) -> Any:
        return (state or 0) + 1

    def reduce_aggregated_logs(self, aggregated_logs: Any, global_step: Any = None) -> Any:
        return {"batches": aggregated_logs}


def test_a_task_that_aggregates_logs_gets_them() -> None:
    config = small_config()
    for task_type, names in ((SmallTask, set()), (_Aggregating, {"batches"})):
        task = task_type(config.task)
        trainer = create_trainer(config, task, train=False, evaluate=True)
        logs = trainer.evaluate(tf.constant(-1))
        assert set(logs) == {"accuracy", "validation_loss", *names}
        assert logs.get("batches", 5) == 5


class _OwnStep(Trainer):
    """A step as subclasses of their Trainer write it."""

    def train_step(self, iterator: Any) -> None:
        def step(inputs: Any) -> None:
            logs = self.task.train_step(inputs, self.model, self.optimizer, self.train_metrics)
            self._train_loss.update_state(logs[self.task.loss])
            self.global_step.assign_add(1)

        self.strategy.run(step, args=(next(iterator),), options=self._runtime_options)


def test_steps_and_logs_are_as_model_gardens_programs_expect() -> None:
    config = small_config()
    trainer = create_trainer(config, SmallTask(config.task), True, True, trainer_cls=_OwnStep)
    logs = trainer.train(tf.constant(2))
    assert (
        logs["training_loss"].numpy() == logs["training_loss"] > 0 and int(trainer.global_step) == 2
    )
    assert (
        trainer._train_metrics == trainer.train_metrics
        and trainer._checkpoint is trainer.checkpoint
    )
    evaluated = trainer.evaluate(tf.constant(1))
    assert type(evaluated["validation_loss"].numpy()) is np.float32
    assert [one.name for one in (trainer._validation_loss, *trainer._validation_metrics)] == [
        "validation_loss",
        "accuracy",
    ]


@pytest.mark.parametrize("path", ["trainer", "task", "task.train_data"])
def test_a_config_without_a_section_is_an_attribute_error(path: str) -> None:
    config = small_config()
    parts = {
        "trainer": config.trainer,
        "runtime": config.runtime,
        "task": SimpleNamespace(validation_data=None),
    }
    given = SimpleNamespace(**{name: part for name, part in parts.items() if name != path})
    task = SmallTask(config.task)
    with pytest.raises(
        AttributeError, match=rf"the trainer needs a config with a section '{path}'"
    ):
        Trainer(given, task, task.build_model(), None)


def test_micro_batches_train_tasks_of_model_garden() -> None:
    config = small_config(
        **{**AVERAGING, "optimizer": {"type": "adamw"}}
    )  # which clips gradients itself
    trainers = []
    for steps in (2, 1):
        with replicas(2).scope():
            task = task_factory.get_task(config.task)
            ours = convert(config).replace(trainer={"accumulate_steps": steps})
            trainers.append(create_trainer(ours, task, True, False))
    split, whole = trainers
    logs = split.train(tf.constant(3))
    with eagerly():
        expected = whole.train(tf.constant(3))
    assert {
        name: pytest.approx(float(value), abs=1e-6) for name, value in expected.items()
    } == dict(logs)
    assert split.optimizer.iterations.numpy() == whole.optimizer.iterations.numpy() == 3
    averages = [
        trainer._average._averages if trainer._average else [] for trainer in (split, whole)
    ]
    pairs = [*zip(_weights(split), _weights(whole), strict=True), *zip(*averages, strict=True)]
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-6)
