"""All optimizers of Model Garden: made whole, saved, restored strictly, and gone on with bit by
bit.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from official.core import task_factory
from official.modeling import optimization
from official.modeling.optimization.configs import optimizer_config

from tests.engine.compat.model_garden.garden_task import (
    BATCH,
    CLASSES,
    FEATURES,
    eagerly,
    restore_newest,
    small_config,
    small_trainer,
)
from trainer_kit.checkpoints.state.strict_restore import create_training_checkpoint, restore
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.optimizers import (
    OptimizerAverages,
    check_values,
    create_optimizer,
    create_optimizer_variables,
    find_averaging_optimizer,
)
from trainer_kit.errors import ConfigError, UsageError

UNRELEASED = ["slide", "adafactor"]  # the public release of Model Garden has their names only
# Each kind once, with the options that give it most to keep.
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"optimizer": {"type": kind}} for kind in ("adagrad", "lamb", "adafactor_keras")},
    **{
        f"{kind}_experimental": {"optimizer": {"type": f"{kind}_experimental"}}
        for kind in ("sgd", "adam", "adamw")
    },
    "sgd, momentum": {"optimizer": {"type": "sgd", "sgd": {"momentum": 0.9, "nesterov": True}}},
    "rmsprop, centered": {
        "optimizer": {"type": "rmsprop", "rmsprop": {"momentum": 0.9, "centered": True}}
    },
    "adam, averaging": {
        "optimizer": {"type": "adam", "adam": {"amsgrad": True}},
        "ema": {"average_decay": 0.9},
    },
    "adamw, averaging all": {
        "optimizer": {"type": "adamw"},
        "ema": {"trainable_weights_only": False},
    },
    "lars, warm-up and cosine": {
        "optimizer": {"type": "lars", "lars": {"weight_decay_rate": 0.01}},
        "learning_rate": {
            "type": "cosine",
            "cosine": {"initial_learning_rate": 0.1, "decay_steps": 3},
        },
        "warmup": {"type": "linear", "linear": {"warmup_steps": 2}},
    },
}


def _checkpoint_values(part: Any, folder: Path) -> dict[str, bytes]:
    """Returns all that a checkpoint holds of model and optimizer, bit by bit."""
    checkpoint = tf.train.Checkpoint(model=part.model, optimizer=part.optimizer)
    reader = tf.train.load_checkpoint(checkpoint.write(str(folder / "all")))
    names = set(reader.get_variable_to_shape_map()) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    return {name: reader.get_tensor(name).tobytes() for name in names}


class _RunParts:
    """The model and the optimizer of a run, as a trainer makes them, and their checkpoint."""

    def __init__(self, case: str) -> None:
        config = small_config(**CASES[case])
        self.task = task_factory.get_task(config.task)
        self.model = self.task.build_model()
        self.optimizer = create_optimizer(self.task, config)
        create_optimizer_variables(self.optimizer, self.model.trainable_variables)
        if find_averaging_optimizer(self.optimizer) is not None:
            OptimizerAverages(self.optimizer, self.model)
        step = tf.Variable(0, dtype=tf.int64)
        self.checkpoint = create_training_checkpoint(
            global_step=step, model=self.model, optimizer=self.optimizer
        )

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            features = tf.random.stateless_normal([BATCH, FEATURES], [seed, 1])
            labels = tf.range(BATCH) % CLASSES
            self.task.train_step((features, labels), self.model, self.optimizer)


@pytest.mark.parametrize("case", CASES)
def test_each_optimizer_goes_on_as_if_it_had_not_stopped(case: str, tmp_path: Path) -> None:
    whole = _RunParts(case)
    begin = _checkpoint_values(whole, tmp_path)
    whole.train(1, 2)
    path = whole.checkpoint.save(str(tmp_path / "middle"))
    middle = _checkpoint_values(whole, tmp_path)
    whole.train(3)
    end = _checkpoint_values(whole, tmp_path)

    # The first step makes nothing that did not exist before.
    assert begin.keys() == middle.keys() == end.keys()
    assert begin != middle != end

    again = _RunParts(case)
    restore(again.checkpoint, path, strict=True)
    assert _checkpoint_values(again, tmp_path) == middle
    again.train(3)
    assert _checkpoint_values(again, tmp_path) == end


def test_the_cases_have_every_optimizer_of_model_garden() -> None:
    sections = vars(optimization.OptimizationConfig().optimizer)
    names = {
        name
        for name, section in sections.items()
        if isinstance(section, optimizer_config.BaseOptimizerConfig)
    }
    assert names == {*(case["optimizer"]["type"] for case in CASES.values()), *UNRELEASED}


@pytest.mark.parametrize("name", ["optimizer", "learning_rate"])
def test_a_missing_optimizer_or_rate_is_refused(name: str) -> None:
    config = small_config(**{name: {"type": None}})
    task = task_factory.get_task(config.task)

    message = r"^trainer\.optimizer_config: Model Garden refuses its values: .*specified"
    with pytest.raises(UsageError, match=message):
        create_optimizer(task, config)


def test_a_model_of_zero_classes_is_refused() -> None:
    class Task(SimpleNamespace):
        __module__ = "official.vision.tasks"  # a task of a user may mean something else by it

    task = Task(task_config=SimpleNamespace(model=SimpleNamespace(num_classes=0)))

    message = r"task\.model\.num_classes: is 0; give the number of classes"
    with pytest.raises(ConfigError, match=message):
        check_values(task, small_config())


@pytest.mark.parametrize("ours", [False, True])
def test_the_task_makes_the_optimizer_from_its_own_config(ours: bool) -> None:
    # The task itself knows the learning rate.
    config = small_config(ema={"average_decay": 0.5}, learning_rate={"type": None})
    arguments: list[Any] = []

    class Task:
        task_config = None

        def create_optimizer(self, optimizer_config: Any, runtime_config: Any = None) -> str:
            arguments.extend([optimizer_config, runtime_config])
            return "the optimizer"

    optimizer = create_optimizer(Task(), convert(config) if ours else config)

    assert optimizer == "the optimizer"
    own_config, runtime_config = arguments
    assert isinstance(own_config, optimization.OptimizationConfig)
    assert own_config == config.trainer.optimizer_config
    assert runtime_config.mixed_precision_dtype is None


def test_differential_privacy_is_for_tasks_that_know_of_it() -> None:
    class Private:
        task_config = None

        def create_optimizer(
            self, optimizer_config: Any, runtime_config: Any = None, dp_config: Any = None
        ) -> Any:
            return dp_config

    class Plain(Private):
        def create_optimizer(self, optimizer_config: Any, runtime_config: Any = None) -> str:
            return "the optimizer"

    config = small_config()
    config.task.differential_privacy_config = {"clipping_norm": 2.0}
    for params in (config, convert(config)):
        assert create_optimizer(Private(), params).clipping_norm == 2.0
        with pytest.raises(UsageError, match=r"^trainer\.optimizer_config: .*Differential privacy"):
            create_optimizer(Plain(), params)


def test_wrapped_optimizers_have_their_slots_before_a_step(tmp_path: Path) -> None:
    model = tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(2)])
    averaging_adam = optimization.ExponentialMovingAverage(tf_keras.optimizers.legacy.Adam())
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(averaging_adam)
    sizes = []
    for _ in range(2):
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "optimizer"))
        sizes.append(len(tf.train.load_checkpoint(path).get_variable_to_shape_map()))
        create_optimizer_variables(optimizer, model.trainable_variables)

    assert sizes[1] >= sizes[0] + 4  # two moments of two variables


@pytest.mark.parametrize(
    ("kind", "ema"),
    [("adam", None), ("adam_experimental", None), ("lamb", {"average_decay": 0.9})],
    ids=str,
)
def test_a_changed_learning_rate_wins_over_the_restored_one(
    kind: str, ema: Any, tmp_path: Path
) -> None:
    def begin_run(rate: float) -> Any:
        learning_rate = {"type": "constant", "constant": {"learning_rate": rate}}
        config = small_config(optimizer={"type": kind}, ema=ema, learning_rate=learning_rate)
        config.trainer.checkpoint_interval = 1
        trainer = small_trainer(config, evaluate=False)
        return trainer, restore_newest(trainer, config, tmp_path)

    with eagerly():
        first, manager = begin_run(0.1)
        first.train(tf.constant(1))
        first.optimizer.learning_rate = 0.3  # as a callback would
        manager.save()

        for rate, expected in ((0.1, 0.3), (0.2, 0.2)):
            again, _ = begin_run(rate)
            assert float(again.train(tf.constant(1))["learning_rate"]) == pytest.approx(expected)
