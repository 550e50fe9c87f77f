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
from official.core import base_trainer, config_definitions, task_factory, train_utils
from official.utils.testing import mock_task

from tests.builders import assert_all_close, replicas
from tests.engine.compat.model_garden.garden_task import (
    BATCH,
    FEATURES,
    SmallTask,
    bits,
    eagerly,
    restore_newest,
    set_full_precision,
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
    "optimizer": {"type": "sgd"},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.05}},
    "ema": {"average_decay": 0.9},
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    gin.clear_config()
    set_full_precision()


def _weights(trainer: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in trainer.model.trainable_variables]


def _floats(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if not name.startswith("best")}


def test_a_config_of_theirs_or_of_ours_trains_as_theirs_does() -> None:
    config = small_config(optimizer={"type": "adam"})
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        task = task_factory.get_task(config.task)
        theirs = train_utils.create_trainer(config, task, train=True, evaluate=True)
    with eagerly():
        training_logs = _floats(theirs.train(tf.constant(3)))
        evaluation_logs = _floats(theirs.evaluate(tf.constant(-1)))

    for ours, execution in ((False, contextlib.nullcontext), (True, eagerly)):
        trainer = small_trainer(config, ours=ours)
        assert type(trainer) is Trainer
        assert trainer.can_train
        assert trainer.config.task is (trainer.task.task_config if ours else config.task)
        assert trainer.config.trainer == convert(config).trainer

        with execution():
            assert _floats(trainer.train(tf.constant(3))) == pytest.approx(training_logs, rel=1e-5)
            for weight, expected in zip(_weights(trainer), _weights(theirs), strict=True):
                np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-7)
            logs = _floats(trainer.evaluate(tf.constant(-1)))
            assert logs == pytest.approx(evaluation_logs, rel=1e-5)


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
    manager = restore_newest(trained, config, tmp_path)
    trained.train(tf.constant(2))
    manager.save()
    expected = _floats(trained.evaluate(tf.constant(1)))

    plain = small_trainer(small_config(), train=False)
    with trained.use_weights():
        averages = _weights(trained)
    for weights, same in ((averages, True), (_weights(trained), False)):
        for variable, value in zip(plain.model.trainable_variables, weights, strict=True):
            variable.assign(value)
        assert (_floats(plain.evaluate(tf.constant(1))) == pytest.approx(expected)) == same

    evaluator = small_trainer(small_config(**AVERAGING), train=False, strategy=replicas(2))
    for folder in (tmp_path, tmp_path / "best_ckpt"):
        path = tf.train.latest_checkpoint(str(folder))
        is_best = folder != tmp_path
        names = CheckpointGraph(path).shapes_by_name()
        assert any(name.startswith("optimizer") for name in names) != is_best

        with evaluator.strategy.scope():
            evaluator.state.restore_weights(path)
        before = bits(evaluator.model.variables)
        # The best checkpoint has the averages in the model's place.
        assert (bits(trained.model.variables) == before) != is_best

        assert _floats(evaluator.evaluate(tf.constant(1))) == pytest.approx(expected)
        assert bits(evaluator.model.variables) == before
        assert evaluator.global_step.numpy() == 2


class _Failing(Trainer):
    """Notes the weights at the end of each evaluation, and raises in the second one."""

    def eval_end(self, aggregated_logs: Any = None) -> Any:
        self.weights_of_evaluations = [
            *getattr(self, "weights_of_evaluations", []),
            bits(self.model.trainable_variables),
        ]
        if len(self.weights_of_evaluations) == 2:
            raise RuntimeError("out of memory")
        return super().eval_end(aggregated_logs)


@pytest.mark.usefixtures("eager")
def test_the_weights_come_back_when_an_evaluation_raises() -> None:
    trainer = small_trainer(small_config(**AVERAGING), trainer_cls=_Failing)
    trainer.train(tf.constant(3))
    averages = bits(trainer.optimizer._average_weights)
    variables = [*trainer.model.variables, *trainer.optimizer._average_weights]
    before = bits(variables)

    logs = trainer.evaluate(tf.constant(-1))
    assert bits(variables) == before

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.evaluate(tf.constant(-1))
    assert trainer.weights_of_evaluations == [averages, averages]
    assert bits(variables) == before
    assert trainer.evaluate(tf.constant(-1)) == logs


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
    task = lookup_task_class(config.task)(config.task)

    assert isinstance(trainer_creation.create_trainer(config, task), MyTrainer)


def test_a_trainer_class_that_is_passed_wins_over_gin() -> None:
    gin.parse_config("create_trainer.trainer_cls = @MyTrainer")
    config = small_config()

    trainer = create_trainer(config, SmallTask(config.task), True, True, trainer_cls=Trainer)

    assert type(trainer) is Trainer


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
    without_task = config_definitions.ExperimentConfig(trainer=config.trainer)
    optimizer = task.create_optimizer(config.trainer.optimizer_config)
    trainer = Trainer(without_task, task, model=task.build_model(), optimizer=optimizer)
    assert "training_loss" in trainer.train(tf.constant(2))


def test_gin_bindings_of_their_trainer_count_for_ours() -> None:
    gin.parse_config("official.core.base_trainer.Trainer.train_dataset = @tests.door.my_data()")
    config = small_config()
    trainer = create_trainer(config, task_factory.get_task(config.task), train=True, evaluate=True)
    features, labels = next(iter(trainer.train_dataset))

    assert features.shape == [BATCH, FEATURES]
    assert not labels.numpy().any()


def test_a_model_garden_trainer_chosen_by_gin_is_run() -> None:
    gin.parse_config("create_trainer.trainer_cls = @official.core.base_trainer.Trainer")
    config = convert(small_config())
    task = lookup_task_class(config.task)(config.task)

    trainer = trainer_creation.create_trainer(config, task)

    assert isinstance(trainer, TrainerAdapter)
    # Its steps are methods of the trainer that it wraps.
    assert isinstance(trainer.train_step.__self__, base_trainer.Trainer)
    assert int(trainer.global_step) == 0


class _Aggregating(SmallTask):
    def aggregate_logs(self, state: Any, step_outputs: Any) -> Any:
        return (state or 0) + 1

    def reduce_aggregated_logs(self, aggregated_logs: Any, global_step: Any = None) -> Any:
        return {"batches": aggregated_logs}


@pytest.mark.usefixtures("eager")
def test_a_task_that_aggregates_logs_gets_them() -> None:
    config = small_config()
    for task_type, names in ((SmallTask, set()), (_Aggregating, {"batches"})):
        task = task_type(config.task)
        trainer = create_trainer(config, task, train=False, evaluate=True)
        logs = trainer.evaluate(tf.constant(-1))
        assert set(logs) == {"accuracy", "validation_loss", *names}
        assert logs.get("batches", 5) == 5


class _OwnStep(Trainer):
    """A step as subclasses of their Trainer write it, which use its private attributes."""

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
    assert logs["training_loss"].numpy() == logs["training_loss"] > 0
    assert int(trainer.global_step) == 2

    evaluation_logs = trainer.evaluate(tf.constant(1))
    assert type(evaluation_logs["validation_loss"].numpy()) is np.float32

    # Subclasses of Model Garden's Trainer read these private attributes.
    assert trainer._train_metrics == trainer.train_metrics
    assert trainer._checkpoint is trainer.checkpoint
    assert trainer._validation_loss.name == "validation_loss"
    assert [metric.name for metric in trainer._validation_metrics] == ["accuracy"]


@pytest.mark.parametrize("path", ["trainer", "task", "task.train_data"])
def test_a_config_without_a_section_is_an_attribute_error(path: str) -> None:
    config = small_config()
    parts = {
        "trainer": config.trainer,
        "runtime": config.runtime,
        "task": SimpleNamespace(validation_data=None),
    }
    incomplete = SimpleNamespace(**{name: part for name, part in parts.items() if name != path})
    task = SmallTask(config.task)

    message = rf"the trainer needs a config with a section '{path}'"
    with pytest.raises(AttributeError, match=message):
        Trainer(incomplete, task, task.build_model(), None)


def test_micro_batches_train_tasks_of_model_garden() -> None:
    # AdamW clips gradients itself.
    config = small_config(**{**AVERAGING, "optimizer": {"type": "adamw"}})
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

    assert dict(logs) == pytest.approx(_floats(expected), abs=1e-6)
    assert split.optimizer.iterations.numpy() == whole.optimizer.iterations.numpy() == 3
    assert_all_close(_weights(split), _weights(whole), atol=1e-6)
    with split.use_weights(), whole.use_weights():
        assert_all_close(_weights(split), _weights(whole), atol=1e-6)
