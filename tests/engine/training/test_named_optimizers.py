"""Several optimizers from the config: each has its variables, slots, period and average."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import assert_all_close, replicas, seeded_trainer, trained_weights
from tests.engine.linear_task import LinearTask
from tests.engine.training.saved_state import restore_trainer, save_trainer
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.optimizers.loss_scale import LossScaleOptimizer
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.serving.model_loading import load_weights
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.trainer import Trainer

RATE = {"type": "constant", "constant": {"learning_rate": 0.05}}
SGD = {"optimizer": {"type": "sgd"}, "learning_rate": RATE}
MOMENTUM = {"optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}}, "learning_rate": RATE}
ADAM = {"optimizer": {"type": "adam"}, "learning_rate": RATE}
HEAD = {"variables": ("/bias",)}
REST = {"variables": (".",)}  # of one layer: more layers are more to trace


class TwoLayers(TinyTask):
    """Layers whose paths do not depend on earlier models of the process."""

    def build_model(self) -> keras.Model:
        layers = [
            keras.layers.Dense(16, "relu", name="dense"),
            keras.layers.Dense(3, name="dense_1"),
        ]
        return keras.Sequential([keras.Input((8,)), *layers])


class ByMethod(LinearTask):
    def optimizer_variables(self, model: Any) -> Mapping[str, Any]:
        return {"head": [model.layers[0].bias], "rest": [model.layers[0].kernel]}


def _create_trainer(
    optimizers: Mapping[str, Any],
    task_type: type[TinyTask] = LinearTask,
    count: int = 1,
    runtime: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Trainer:
    optimizer_config = {} if optimizers else {**SGD}
    config = tiny_experiment(
        optimizer_config=optimizer_config, optimizers=dict(optimizers), **trainer
    )
    config = config.replace(
        runtime=dict(runtime or {}), task={"train_data": {"global_batch_size": 16}}
    )
    return seeded_trainer(config, task_type, count)


def test_equal_optimizers_train_as_one() -> None:
    two_optimizers = _create_trainer({"head": {**SGD, **HEAD}, "rest": {**SGD, **REST}})
    one_optimizer = _create_trainer({})

    for trainer in (two_optimizers, one_optimizer):
        trainer.train(tf.constant(4))

    assert_all_close(trained_weights(two_optimizers), trained_weights(one_optimizer))


@pytest.mark.parametrize("task_type", [LinearTask, ByMethod])
def test_each_has_slots_for_its_own_variables_only(task_type: type[TinyTask]) -> None:
    patterns = (HEAD, REST) if task_type is LinearTask else ({}, {})
    trainer = _create_trainer(
        {"head": {**ADAM, **patterns[0]}, "rest": {**ADAM, **patterns[1]}}, task_type
    )
    shapes = {
        name: [tuple(v.shape) for v in optimizer.variables if len(v.shape)]
        for name, optimizer in trainer.optimizer.items()
    }

    assert shapes == {"head": [(3,)] * 2, "rest": [(8, 3)] * 2}


def test_a_period_of_5_updates_twice_in_10_steps() -> None:
    """In loops of one step, and then in loops of five."""
    sections = {"head": {**MOMENTUM, **HEAD, "period": 5}, "rest": {**MOMENTUM, **REST}}
    trainer = _create_trainer(sections, count=2)
    head = trainer.model.layers[0].bias
    changes = []

    for steps in [1] * 10 + [5] * 2:
        before = head.numpy()
        trainer.train(tf.constant(steps))
        changes.append(bool((head.numpy() != before).any()))

    assert changes == ([False] * 4 + [True]) * 2 + [True, True]

    counts = {
        name: int(optimizer.iterations.numpy()) for name, optimizer in trainer.optimizer.items()
    }
    assert counts == {"head": 4, "rest": 20}
    assert trainer.global_step.numpy() == 20


def test_gradients_of_a_period_are_averaged_if_asked() -> None:
    """This is SGD on the four batches together: weights change at the end of a period only.

    Gradients of one optimizer are clipped, which hides a factor; those of the other are not.
    """
    clip = {"optimizer": {"type": "sgd", "sgd": {"global_clipnorm": 0.1}}, "learning_rate": RATE}
    sections = {"head": {**SGD, **HEAD}, "rest": {**clip, **REST}}
    period = {"period": 4, "accumulate": True}
    random = np.random.default_rng(0)
    batches = [
        (np.float32(random.normal(size=(16, 8))), random.integers(0, 3, 16)) for _ in range(4)
    ]
    together = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
    whole = _create_trainer(sections)
    whole.train_dataset = _build_dataset([together], 1)
    whole.train(tf.constant(1))

    trainer = _create_trainer(
        {name: {**section, **period} for name, section in sections.items()}, count=2
    )
    trainer.train_dataset = _build_dataset(batches, 2)

    trainer.train(tf.constant(4))

    assert_all_close(trained_weights(trainer), trained_weights(whole), atol=2e-7)


def _build_dataset(batches: list[Any], count: int) -> Any:
    features, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    size = len(batches[0][0])
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(
        size, drop_remainder=True
    )
    if count > 1:
        return replicas(count).experimental_distribute_dataset(dataset)
    return dataset


def test_every_form_of_a_step_counts_periods() -> None:
    sections = {"head": {**MOMENTUM, **HEAD, "period": 3}, "rest": {**SGD, **REST}}
    plain = _create_trainer(sections)
    in_micro_batches = _create_trainer(sections, accumulate_steps=2)
    fused = _create_trainer(sections, fuse_steps=3, steps_per_loop=6, summary_interval=6)

    for trainer in (plain, in_micro_batches, fused):
        trainer.train(tf.constant(6))
        assert trainer.optimizer["head"].iterations.numpy() == 2

    assert_all_close(trained_weights(in_micro_batches), trained_weights(plain), atol=1e-6)
    assert_all_close(trained_weights(fused), trained_weights(plain), atol=1e-6)


def test_each_optimizer_has_a_loss_scale_of_its_own() -> None:
    sections = {"head": {**SGD, **HEAD, "loss_scale": 8.0}, "rest": {**SGD, **REST}}
    runtime = {"mixed_precision_dtype": "float16"}
    with precision_scope(RuntimeConfig(**runtime)):
        several = _create_trainer(sections, runtime=runtime)
        single = _create_trainer({}, runtime={**runtime, "loss_scale": 8.0})

    for trainer in (several, single):
        trainer.train(tf.constant(2))
    scales = {
        name: float(optimizer.dynamic_scale.numpy())
        for name, optimizer in several.optimizer.items()
    }

    assert scales == {"head": 8.0, "rest": 2.0**15}
    assert_all_close(trained_weights(several), trained_weights(single), atol=1e-6)


def test_checkpoints_with_averages_of_a_part_are_loaded(tmp_path: Path) -> None:
    sections = {
        "head": {**SGD, **HEAD, "ema": {"more_decays": {"fast": 0.5}}},
        "rest": {**SGD, **REST},
    }
    trainer = _create_trainer(sections)
    trainer.train(tf.constant(5))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-5"))
    model = _create_trainer({}).model

    for name in ("average", "fast"):
        assert load_weights(model, path, averaged=True if name == "average" else name).averaged
        with trainer.use_weights(name):
            assert_all_close(model.get_weights(), trained_weights(trainer))


def test_averages_have_the_keys_of_one_average_of_all() -> None:
    """So the layer "dense_1" has its number even where it alone is averaged."""
    averaged = {**SGD, "ema": {}}
    last = {"variables": ("/dense_1/",)}
    several = _create_trainer(
        {"head": {**averaged, **last}, "rest": {**averaged, **REST}}, TwoLayers
    )
    part = _create_trainer({"head": {**averaged, **last}, "rest": {**SGD, **REST}}, TwoLayers)
    whole = _create_trainer({"all": {**averaged, **REST}}, TwoLayers)
    keys = [list(member.checkpoint.average) for member in (several, part, whole)]

    assert keys[0] == keys[2]
    assert keys[1] == keys[2][2:]
    assert keys[2][2].endswith("dense_1/kernel")


def test_each_optimizer_has_several_averages_of_its_variables() -> None:
    ema = {"average_decay": 0.9, "more_decays": {"fast": 0.5}, "dynamic_decay": False}
    sections = {
        "head": {**SGD, **HEAD, "ema": {**ema, "more_decays": {"fast": 0.0}}},
        "rest": {**SGD, **REST, "ema": ema},
    }
    trainer = _create_trainer(sections)
    trainer.train(tf.constant(5))
    before = trained_weights(trainer)

    with trainer.use_weights("fast"):
        inside = trained_weights(trainer)

    same = [bool((value == other).all()) for value, other in zip(before, inside, strict=True)]

    assert same == [False, True]
    assert trainer.average_names == ["average", "fast"]


def test_the_learning_rate_of_each_is_reported() -> None:
    slow = {"type": "constant", "constant": {"learning_rate": 0.01}}
    trainer = _create_trainer(
        {"head": {**SGD, **HEAD, "learning_rate": slow}, "rest": {**SGD, **REST}}
    )

    logs = trainer.train(tf.constant(1))

    assert {name: round(float(rate), 6) for name, rate in logs["learning_rate"].items()} == {
        "head": 0.01,
        "rest": 0.05,
    }


def test_variables_that_nobody_updates_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = _create_trainer({"head": {**SGD, "variables": ("/dense_1/",)}}, TwoLayers)

    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if "no optimizer updates" in record.getMessage()
    ]

    assert "dense/kernel" in warning
    assert "dense_1" not in warning

    before = trained_weights(trainer)

    trainer.train(tf.constant(2))
    changed = [
        bool((value != other).any())
        for value, other in zip(before, trained_weights(trainer), strict=True)
    ]

    assert changed == [False, False, True, True]


class OwnOptimizers(ByMethod):
    """Makes the optimizers by itself; only one of them scales the loss."""

    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return {
            "head": LossScaleOptimizer(keras.optimizers.SGD(0.05)),
            "rest": keras.optimizers.SGD(0.05),
        }


class OneOfKeras2(ByMethod):
    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return {"head": tf_keras.optimizers.SGD(0.05), "rest": keras.optimizers.SGD(0.05)}


@pytest.mark.parametrize(
    ("optimizers", "task_type", "message"),
    [
        (
            {"head": {**SGD, "variables": ("^dense/",)}},
            TwoLayers,
            "trainer.optimizers.head.variables.*dense/kernel",
        ),
        (
            {"a": {**SGD, **REST}, "b": {**SGD, **HEAD}},
            LinearTask,
            "trainer.optimizers.b.variables: a, which comes first",
        ),
        (
            {"head": SGD},
            LinearTask,
            "trainer.optimizers.head has no variables.*optimizer_variables",
        ),
        ({"heads": {**SGD, **REST}}, ByMethod, "names head, rest, which .*; rename heads to head"),
        (
            {"head": {**SGD, **REST}, "rest": SGD},
            ByMethod,
            "two optimizers would update .*: head and rest",
        ),
        (
            {},
            ByMethod,
            "ByMethod.optimizer_variables names .* head, rest, and there is one optimizer",
        ),
        ({"head": {**SGD, **HEAD}}, OwnOptimizers, "create_optimizer returns several optimizers"),
        ({}, OneOfKeras2, "the optimizer 'head' is a tf_keras.*SGD; several optimizers .* Keras 3"),
    ],
)
def test_a_mistake_is_told_before_the_first_step(
    optimizers: Mapping[str, Any], task_type: type[TinyTask], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _create_trainer(optimizers, task_type)


def test_a_resumed_run_has_the_bits_of_one_never_stopped(tmp_path: Path) -> None:
    accumulated = {
        **MOMENTUM,
        **HEAD,
        "period": 3,
        "accumulate": True,
        "ema": {"average_decay": 0.9},
    }
    sections = {"head": accumulated, "rest": {**MOMENTUM, **REST, "period": 2}}
    whole, resumed = (_create_trainer(sections) for _ in range(2))
    whole.initialize()
    whole.train(tf.constant(10))
    path = save_trainer(whole, tmp_path)
    whole.train(tf.constant(10))

    restore_trainer(resumed, path)
    resumed.train(tf.constant(10))

    assert any("gradient_sum" in name for name, _ in tf.train.list_variables(path))
    for name, optimizer in whole.optimizer.items():
        values = [variable.numpy() for variable in optimizer.variables]
        assert_all_close((v.numpy() for v in resumed.optimizer[name].variables), values)
    averages = resumed.checkpoint.average
    for name, average in whole.checkpoint.average.items():
        np.testing.assert_array_equal(averages[name].numpy(), average.numpy())
    assert_all_close(trained_weights(resumed), trained_weights(whole))


def test_some_optimizers_with_a_loss_scale_train_as_none() -> None:
    own = _create_trainer({}, OwnOptimizers)
    plain = _create_trainer({})

    for trainer in (own, plain):
        trainer.train(tf.constant(2))

    assert_all_close(trained_weights(own), trained_weights(plain), atol=1e-6)


@pytest.mark.parametrize(
    ("field", "config"), [("optimizer", SGD), ("learning_rate", {"learning_rate": RATE})]
)
def test_a_section_that_nothing_uses_is_refused(field: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"do not use optimizer_config.{field}"):
        tiny_experiment(optimizer_config=config, optimizers={"all": {**SGD, **REST}})
