"""What happens after loops and evaluations, for trainers of both frameworks; real ones, beside
Model Garden's.
"""

from __future__ import annotations

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
from official.core import base_trainer

from tests.engine.compat.model_garden.garden_task import SmallTask, small_config
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.compat.model_garden import actions
from trainer_kit.errors import UsageError
from trainer_kit.training.trainer_creation import create_trainer

EMA = {"average_decay": 0.5, "trainable_weights_only": True}


@pytest.fixture(autouse=True)
def clean_gin() -> Iterator[None]:
    yield
    gin.clear_config()


def _garden_trainer(params: Any) -> base_trainer.Trainer:
    task = SmallTask(params.task)
    optimizer = SmallTask.create_optimizer(params.trainer.optimizer_config)
    return base_trainer.Trainer(params, task, task.build_model(), optimizer)


def _garden_params(ema: Any = None, **trainer: Any) -> Any:
    params = small_config(ema=ema)
    params.trainer.override(trainer)
    return params


def _class_names(train_actions: list[Any]) -> list[str]:
    """Returns the names of the actions' classes; of a conditional action, those of its parts."""
    names = []
    for action in train_actions:
        parts = [action.condition, action.action] if hasattr(action, "condition") else [action]
        names += [type(part).__name__ for part in parts]
    return names


@pytest.mark.parametrize("trials", [-1, 0, 3])
def test_a_trainer_of_theirs_gets_what_theirs_would_give_it(tmp_path: Path, trials: int) -> None:
    params = _garden_params(
        recovery_max_trials=trials, loss_upper_bound=5.0, recovery_begin_steps=2
    )
    trainer = _garden_trainer(params)
    manager = tf.train.CheckpointManager(trainer.checkpoint, str(tmp_path), max_to_keep=1)
    ours = actions.get_train_actions(params, trainer, str(tmp_path), manager)
    expected = theirs.get_train_actions(params, trainer, str(tmp_path), manager)

    assert _class_names(ours) == _class_names(expected)
    for action in ours:
        assert action.condition.loss_upper_bound == 5.0
        assert action.condition.recovery_begin_steps == 2
        assert action.condition.recovery_max_trials == trials
        assert action.condition.global_step is trainer.global_step


@pytest.mark.parametrize(
    "params", [linear_experiment(recovery_max_trials=3), _garden_params()], ids=["ours", "theirs"]
)
def test_our_trainer_gets_no_actions_that_its_runner_does(tmp_path: Path, params: Any) -> None:
    config = linear_experiment()
    trainer = create_trainer(config, LinearTask(config.task))

    assert actions.get_train_actions(params, trainer, str(tmp_path), None) == []
    assert actions.get_eval_actions(params, trainer, str(tmp_path)) == []


@pytest.mark.parametrize("ema", [False, True])
def test_model_gardens_averaging_trainer_saves_its_averages(tmp_path: Path, ema: bool) -> None:
    params = _garden_params(EMA if ema else None)

    # Without a scope Model Garden's action refuses.
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        trainer = _garden_trainer(params)
        for action in actions.get_eval_actions(params, trainer, str(tmp_path)):
            action({})
    assert os.path.exists(tmp_path / "ema_checkpoints" / "average_weights-0.index") == ema


def test_a_trainer_of_ours_that_averages_saves_the_averages_too(tmp_path: Path) -> None:
    config = linear_experiment(
        optimizer_config={**linear_experiment().trainer.optimizer_config.as_dict(), "ema": EMA}
    )
    trainer = create_trainer(config, LinearTask(config.task))
    trainer.train(tf.constant(5))
    weights = [variable.numpy() for variable in trainer.model.trainable_variables]
    with trainer.use_weights():
        averages = [variable.numpy() for variable in trainer.model.trainable_variables]
    (action,) = actions.get_eval_actions(config, trainer, str(tmp_path))
    action({})
    path = str(tmp_path / "ema_checkpoints" / "average_weights-5")

    for variable, weight in zip(trainer.model.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), weight)

    trainer.state.weights_checkpoint.read(path).expect_partial()
    for variable, average in zip(trainer.model.trainable_variables, averages, strict=True):
        np.testing.assert_array_equal(variable.numpy(), average)
    assert not np.array_equal(weights[0], averages[0])


def test_pruning_without_its_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So Python remembers a package that is missing.
    monkeypatch.setitem(sys.modules, "tensorflow_model_optimization", None)
    params = SimpleNamespace(task=SimpleNamespace(pruning="on"))
    trainer = SimpleNamespace(model=None, optimizer=None)

    message = r"task\.pruning: a package is missing: .*tensorflow_model_optimization"
    with pytest.raises(UsageError, match=message):
        actions.get_train_actions(params, trainer, str(tmp_path), None)


def test_a_short_gin_binding_is_for_both(tmp_path: Path) -> None:
    gin.parse_config(f"get_eval_actions.model_dir = '{tmp_path}'")
    params = _garden_params(EMA)
    trainer = _garden_trainer(params)
    for get_eval_actions in (actions.get_eval_actions, theirs.get_eval_actions):
        (action,) = get_eval_actions(params, trainer)  # type: ignore[call-arg]
        assert action._checkpoint_manager.directory == str(tmp_path / "ema_checkpoints")


def test_a_task_that_prunes_gets_the_action(tmp_path: Path) -> None:
    pruning = pytest.importorskip("tensorflow_model_optimization").sparsity.keras
    layer = pruning.prune_low_magnitude(
        tf_keras.layers.Dense(4), pruning.ConstantSparsity(0.5, 0, frequency=1)
    )
    model = tf_keras.Sequential([tf_keras.Input((4,)), layer])
    trainer = SimpleNamespace(model=model, optimizer=tf_keras.optimizers.legacy.SGD())
    options = _garden_params(recovery_max_trials=-1, preemption_on_demand_checkpoint=False).trainer
    params = SimpleNamespace(task=SimpleNamespace(pruning="on"), trainer=options)

    train_actions = actions.get_train_actions(params, trainer, str(tmp_path), None)

    assert _class_names(train_actions) == ["PruningAction"]
