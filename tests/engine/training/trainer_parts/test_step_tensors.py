"""Named tensors of training and evaluation steps: their values on replicas, fused and in parts, and as metrics."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from trainer_kit.errors import UsageError
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.testing.tiny_task import tiny_arrays
from trainer_kit.training.metrics import MetricSet
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_parts.validation_sets import ValidationSets

MEAN = {"type": "keras", "keras": {"metric": "Mean", "args": {"name": "mean_top"}}, "tensor": "top"}


class ExposingTask(TinyTask):
    """Exposes a tensor of the model, a scalar and a text of the loss, and the labels of a training step."""

    def build_model(self) -> keras.Model:
        model = super().build_model()
        model.layers[0].name = "hidden"
        return model

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        tk.expose("top", tf.reduce_max(model_outputs, axis=1))
        tk.expose("first_label", labels[0])
        return tk.expose("cost", super().build_losses(labels, model_outputs, aux_losses))

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> dict[str, Any]:
        tk.expose("labels", inputs[1])
        return super().train_step(inputs, model, optimizer, metrics)


def _trainer(*names: str, strategy: Any = None, evaluate: bool = False, runtime: Any = None, **options: Any) -> Trainer:
    keras.utils.set_random_seed(3)
    config = tiny_experiment(**options).replace(runtime=runtime or {})
    with (strategy or tf.distribute.get_strategy()).scope():
        trainer: Trainer = Trainer.create(config, ExposingTask(config.task), train=True, evaluate=evaluate)
    for name in names:
        trainer.train_tensors.ask(name, "a test")
        if evaluate:
            trainer.eval_tensors.ask(name, "a test")
    return trainer


def _values(trainer: Trainer, steps: int = 5) -> dict[str, Any]:
    trainer.train(tf.constant(steps))
    return dict(trainer.train_tensors.values)


NAMES = ("labels", "hidden", "cost", "top", "first_label")


def test_values_are_those_of_the_last_step_in_each_kind_of_loop() -> None:
    plain = _values(_trainer(*NAMES))
    batches = iter(_trainer().data.iterator())
    for _ in range(5):
        _, labels = next(batches)
    np.testing.assert_array_equal(plain["labels"], labels)
    assert plain["hidden"].shape == (8, 16)
    assert plain["cost"].dtype == np.float32
    assert plain["first_label"] == labels[0]
    for options in (
        {"fuse_steps": 4},
        {"train_tf_while_loop": False, "train_tf_function": False},
        {"runtime": {"enable_xla": True}},
    ):
        other = _values(_trainer(*NAMES, **options))
        assert other.keys() == plain.keys()
        for name in NAMES:
            np.testing.assert_allclose(other[name], plain[name], rtol=1e-4, atol=1e-5, err_msg=f"{options}: {name}")


def test_fused_steps_keep_no_tensor_where_a_gpu_cannot_reach_it() -> None:
    trainer = _trainer("labels", fuse_steps=4)
    assert _values(trainer)["labels"].dtype == np.int32
    assert [variable.dtype for variable in trainer.train_tensors.value_variables] == [tf.int64]  # int32: on the CPU


def test_replicas_concatenate_tensors_and_average_scalars() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    plain = _trainer(*NAMES, evaluate=True, metrics=[MEAN])
    mirrored = _trainer(*NAMES[1:], strategy=strategy, evaluate=True, metrics=[MEAN])
    first, second = _values(plain), _values(mirrored)
    for name in ("hidden", "cost", "top"):
        np.testing.assert_allclose(second[name], first[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert second["first_label"] == (first["labels"][0] + first["labels"][4]) / 2


def test_a_metric_is_updated_with_a_tensor_in_both_steps() -> None:
    trainer = _trainer("top", evaluate=True, metrics=[MEAN], steps_per_loop=1)
    assert "mean_top" in (trainer.validation_metric_names() or ())
    logs = trainer.train(tf.constant(1))
    assert logs["mean_top"] == pytest.approx(trainer.train_tensors.values["top"].mean(), rel=1e-5)
    logs = trainer.evaluate(tf.constant(1))
    assert logs["mean_top"] == pytest.approx(trainer.eval_tensors.values["top"].mean(), rel=1e-5)
    assert not any("tensors" in name for name in logs)


def test_micro_batches_give_the_values_of_the_last_one() -> None:
    whole = _values(_trainer("labels"), 1)["labels"]
    part = _values(_trainer("labels", "hidden", accumulate_steps=3), 1)
    np.testing.assert_array_equal(part["labels"], whole[-len(part["labels"]) :])
    assert part["hidden"].shape == (2, 16)


def test_several_validation_sets_keep_values_of_their_own() -> None:
    config = tiny_experiment().replace(
        task={"validation_data": {"dev": {"global_batch_size": 8}, "test": {"global_batch_size": 5}}}
    )
    trainer: Trainer = Trainer.create(config, ExposingTask(config.task), train=False, evaluate=True)
    trainer.eval_tensors.ask("top", "a test")
    own = [dataclasses.replace(one, metrics=MetricSet("validation_loss", [], exact=True)) for one in trainer.validation]
    for sets in (trainer.validation, ValidationSets(own)):
        trainer.set_validation_sets(sets)
        trainer.evaluate(tf.constant(2))
        assert {name: one["top"].shape for name, one in trainer.eval_tensors.values.items()} == {
            "dev": (8,),
            "test": (5,),
        }


def test_fused_steps_need_tensors_of_a_known_shape() -> None:
    class DatasetTask(ExposingTask):
        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            return tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).repeat().batch(8)

    config = tiny_experiment(fuse_steps=5)
    trainer: Trainer = Trainer.create(config, DatasetTask(config.task), train=True, evaluate=False)
    trainer.train_tensors.ask("hidden", "a test")
    with pytest.raises(UsageError, match=r"a test: the tensor 'hidden' has the shape \(None, 16\), and fused steps"):
        trainer.train(tf.constant(5))


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("hiden",), {}, r"a test: the training step exposes no tensor 'hiden', and no layer .* did you mean hidden\?"),
        (
            ("zz",),
            {},
            r"no tensor 'zz'.*; there are: cost, dense_\d+, dropout\w*, first_label, hidden, labels, \w+, top$",
        ),
        ((), {"metrics": [{**MEAN, "tensor": "tip"}]}, r"trainer\.metrics\[0\]: the training step .* did you mean top"),
        ((), {"metrics": [MEAN, MEAN]}, r"trainer\.metrics\[0\]: another metric is called 'mean_top' too"),
    ],
)
def test_a_miss_names_who_asks_and_what_there_is(names: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _values(_trainer(*names, **options))


def test_a_tensor_cannot_be_asked_for_after_the_first_step() -> None:
    trainer = _trainer()
    assert _values(trainer) == {}
    with pytest.raises(UsageError, match="the tensor 'top' is asked for after the first training step; ask before"):
        trainer.train_tensors.ask("top", "a test")


class FailingTask(TinyTask):
    """Exposes a tensor whose operation fails whenever it runs."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        tk.expose("fails", tf.strings.to_number(tf.strings.as_string(labels) + "x"))
        return super().build_losses(labels, model_outputs, aux_losses)


@pytest.mark.parametrize("executor", ["default", "single_threaded"])
def test_a_tensor_that_nobody_asks_for_is_not_computed(executor: str) -> None:
    config = tiny_experiment().replace(runtime={"executor": executor})
    for asks in (False, True):
        trainer: Trainer = Trainer.create(config, FailingTask(config.task), train=True, evaluate=True)
        if asks:
            trainer.train_tensors.ask("fails", "a test")
        with pytest.raises(tf.errors.InvalidArgumentError) if asks else contextlib.nullcontext():
            trainer.train(tf.constant(2))
        trainer.evaluate(tf.constant(2))


def test_values_are_not_in_checkpoints_and_change_no_weight() -> None:
    plain, asked = _trainer(), _trainer(*NAMES)
    for trainer in (plain, asked):
        trainer.train(tf.constant(5))
    for one, other in zip(plain.model.variables, asked.model.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert plain.state.discovered.items.keys() == asked.state.discovered.items.keys()
