"""What happens after loops and evaluations, for trainers of both frameworks; real ones, beside Model Garden's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gin
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from official.core import actions as theirs
from official.core import base_task, base_trainer, config_definitions

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.compat.model_garden import actions
from trainer_kit.errors import UsageError
from trainer_kit.training.trainer_creation import create_trainer

EMA = {"average_decay": 0.5, "trainable_weights_only": True}


@pytest.fixture(autouse=True)
def clean_gin() -> Iterator[None]:
    yield
    gin.clear_config()


class _GardenTask(base_task.Task):
    """A task of Model Garden: a line."""

    def build_model(self) -> Any:
        return tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(2)])

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((tf.ones([2, 3]), tf.ones([2, 2]))).repeat()

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        return tf.reduce_mean((labels - model_outputs) ** 2)


def _garden_trainer(params: Any, ema: bool = False) -> base_trainer.Trainer:
    task = _GardenTask(params.task)
    options: dict[str, Any] = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}},
    }
    params.trainer.optimizer_config = {**options, **({"ema": EMA} if ema else {})}
    from official.modeling.optimization import OptimizationConfig

    optimizer = _GardenTask.create_optimizer(OptimizationConfig(params.trainer.optimizer_config))
    return base_trainer.Trainer(params, task, task.build_model(), optimizer)


def _garden_params(**trainer: Any) -> config_definitions.ExperimentConfig:
    return config_definitions.ExperimentConfig(
        task=config_definitions.TaskConfig(), trainer=config_definitions.TrainerConfig(**trainer)
    )


def _kinds(found: list[Any]) -> list[str]:
    inside = [[type(one.condition), type(one.action)] if hasattr(one, "condition") else [type(one)] for one in found]
    return [kind.__name__ for kinds in inside for kind in kinds]


@pytest.mark.parametrize("trials", [-1, 0, 3])
def test_a_trainer_of_theirs_gets_what_theirs_would_give_it(tmp_path: Path, trials: int) -> None:
    params = _garden_params(recovery_max_trials=trials, loss_upper_bound=5.0, recovery_begin_steps=2)
    trainer = _garden_trainer(params)
    manager = tf.train.CheckpointManager(trainer.checkpoint, str(tmp_path), max_to_keep=1)
    ours = actions.get_train_actions(params, trainer, str(tmp_path), manager)
    assert _kinds(ours) == _kinds(theirs.get_train_actions(params, trainer, str(tmp_path), manager))
    for one in ours:
        condition = one.condition
        assert (condition.loss_upper_bound, condition.recovery_begin_steps) == (5.0, 2)
        assert (condition.recovery_max_trials, condition.global_step) == (trials, trainer.global_step)


def test_a_preemption_is_seen_where_there_is_a_cluster(tmp_path: Path) -> None:
    params = _garden_params(recovery_max_trials=-1)
    trainer = _garden_trainer(params)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    on_a_cluster = SimpleNamespace(global_step=trainer.global_step, strategy=SimpleNamespace(cluster_resolver=resolver))
    manager = tf.train.CheckpointManager(trainer.checkpoint, str(tmp_path), max_to_keep=1)
    found = []
    for module in (actions, theirs):
        try:
            found.append(_kinds(module.get_train_actions(params, on_a_cluster, str(tmp_path), manager)))
        except Exception as error:  # TensorFlow wants a real cluster: ours asks it for the same
            found.append([type(error).__name__, str(error)])
    assert found[0] == found[1]


@pytest.mark.parametrize("params", [linear_experiment(recovery_max_trials=3), _garden_params()], ids=["ours", "theirs"])
def test_our_trainer_gets_no_actions_that_its_runner_does(tmp_path: Path, params: Any) -> None:
    config = linear_experiment()
    trainer = create_trainer(config, LinearTask(config.task))
    assert actions.get_train_actions(params, trainer, str(tmp_path), None) == []
    assert actions.get_eval_actions(params, trainer, str(tmp_path)) == []


@pytest.mark.parametrize("ema", [False, True])
def test_model_gardens_averaging_trainer_saves_its_averages(tmp_path: Path, ema: bool) -> None:
    params = _garden_params(max_to_keep=2)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():  # without one Model Garden's action refuses
        trainer = _garden_trainer(params, ema)
        for action in actions.get_eval_actions(params, trainer, str(tmp_path)):
            action({})
    assert os.path.exists(tmp_path / "ema_checkpoints" / "average_weights-0.index") == ema


def test_a_trainer_of_ours_that_averages_saves_the_averages_too(tmp_path: Path) -> None:
    config = linear_experiment(optimizer_config={**linear_experiment().trainer.optimizer_config.as_dict(), "ema": EMA})
    trainer = create_trainer(config, LinearTask(config.task))
    trainer.train(tf.constant(5))
    weights = [variable.numpy() for variable in trainer.model.trainable_variables]
    with trainer.averaged_weights():
        averages = [variable.numpy() for variable in trainer.model.trainable_variables]
    (action,) = actions.get_eval_actions(config, trainer, str(tmp_path))
    action({})
    path = str(tmp_path / "ema_checkpoints" / "average_weights-5")
    for variable, weight in zip(trainer.model.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), weight)
    trainer.state.weights.read(path).expect_partial()
    for variable, average in zip(trainer.model.trainable_variables, averages, strict=True):
        np.testing.assert_array_equal(variable.numpy(), average)
    assert not np.array_equal(weights[0], averages[0])


def _pruned() -> tuple[Any, Any]:
    pruning = importlib.import_module("tensorflow_model_optimization").sparsity.keras
    schedule = pruning.ConstantSparsity(0.5, begin_step=0, frequency=1)
    model = tf_keras.Sequential([tf_keras.Input((4,)), pruning.prune_low_magnitude(tf_keras.layers.Dense(4), schedule)])
    optimizer = tf_keras.optimizers.legacy.SGD()
    optimizer.iterations.assign(3)
    return model, optimizer


def test_a_task_that_prunes_gets_the_action_with_either_trainer(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow_model_optimization")
    model, optimizer = _pruned()
    config = linear_experiment()
    ours = create_trainer(config, LinearTask(config.task))
    params = SimpleNamespace(task=SimpleNamespace(pruning="on"), trainer=_garden_params(recovery_max_trials=-1).trainer)
    params.trainer.preemption_on_demand_checkpoint = False
    ours._model, ours._optimizer = model, optimizer
    trainer = SimpleNamespace(model=model, optimizer=optimizer)
    for one in (ours, trainer):
        assert _kinds(actions.get_train_actions(params, one, str(tmp_path), None)) == ["PruningAction"]


def test_pruning_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_model_optimization", None)  # as Python knows one that is missing
    params = SimpleNamespace(task=SimpleNamespace(pruning="on"))
    with pytest.raises(UsageError, match=r"task\.pruning: a package is missing: .*tensorflow_model_optimization"):
        actions.get_train_actions(params, SimpleNamespace(model=None, optimizer=None), str(tmp_path), None)


def test_a_short_gin_binding_is_for_ours_with_theirs_imported(tmp_path: Path) -> None:
    gin.parse_config(f"get_eval_actions.model_dir = '{tmp_path}'")
    params = _garden_params()
    trainer = _garden_trainer(params, ema=True)
    (action,) = actions.get_eval_actions(params, trainer)  # type: ignore[call-arg]
    assert action._checkpoint_manager.directory == str(tmp_path / "ema_checkpoints")
    with pytest.raises(TypeError, match="model_dir"):
        theirs.get_eval_actions(params, trainer)


def test_a_whole_gin_name_of_theirs_is_for_both(tmp_path: Path) -> None:
    gin.parse_config(f"official.core.actions.get_eval_actions.model_dir = '{tmp_path}'")
    params = _garden_params()
    trainer = _garden_trainer(params, ema=True)
    assert len(actions.get_eval_actions(params, trainer)) == len(theirs.get_eval_actions(params, trainer)) == 1  # type: ignore[call-arg]
