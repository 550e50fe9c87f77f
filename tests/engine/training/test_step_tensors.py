"""Named tensors of training and evaluation steps: on replicas, fused, in parts, as metrics."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import assert_all_close, seeded_trainer
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.testing.tiny_task import tiny_arrays
from trainer_kit.training.metric_set import MetricSet
from trainer_kit.training.task_inputs import ValidationSets
from trainer_kit.training.trainer import Trainer

MEAN = {"type": "keras", "keras": {"metric": "Mean", "args": {"name": "mean_top"}}, "tensor": "top"}


class ExposingTask(LinearTask):
    """Exposes a tensor of the model, a scalar and a text of the loss, and labels of training."""

    def build_model(self) -> keras.Model:
        model = super().build_model()
        model.layers[0].name = "hidden"
        return model

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        tk.expose("top", tf.reduce_max(model_outputs, axis=1))
        tk.expose("first_label", labels[0])
        return tk.expose("cost", super().build_losses(labels, model_outputs, aux_losses))

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        tk.expose("labels", inputs[1])
        return super().train_step(inputs, model, optimizer, metrics)


def _create_trainer(
    *names: str, count: int = 1, evaluate: bool = False, runtime: Any = None, **options: Any
) -> Trainer:
    config = linear_experiment(**options).replace(runtime=runtime or {})
    trainer: Trainer = seeded_trainer(config, ExposingTask, count, evaluate=evaluate)
    for name in names:
        trainer.train_tensors.request_value(name, "a test")
        if evaluate:
            trainer.eval_tensors.request_value(name, "a test")

    return trainer


def _read_values(trainer: Trainer, steps: int = 5) -> dict[str, Any]:
    trainer.train(tf.constant(steps))
    return dict(trainer.train_tensors.values)


NAMES = ("labels", "hidden", "cost", "top", "first_label")


@pytest.fixture(scope="module")
def asked_trainer() -> Trainer:
    """A trainer after five steps, which was asked for all tensors."""
    trainer = _create_trainer(*NAMES)
    trainer.train(tf.constant(5))
    return trainer


@pytest.fixture(scope="module")
def plain() -> Trainer:
    """A trainer after five steps, which nobody asked for a tensor."""
    trainer = _create_trainer()
    trainer.train(tf.constant(5))
    return trainer


def _read_labels(steps: int) -> Any:
    """Returns the labels of the batch of a step, counted from 1."""
    batches = iter(_create_trainer().data.iterator())
    return [next(batches)[1] for _ in range(steps)][-1].numpy()


def test_values_are_those_of_the_last_step_in_each_kind_of_loop(asked_trainer: Trainer) -> None:
    values = asked_trainer.train_tensors.values
    labels = _read_labels(5)

    np.testing.assert_array_equal(values["labels"], labels)
    assert values["hidden"].shape == (8, 3)
    assert values["cost"].dtype == np.float32
    assert values["first_label"] == labels[0]

    for options in (
        {"fuse_steps": 4},
        {"train_tf_while_loop": False, "train_tf_function": False},
        {"runtime": {"enable_xla": True}},
    ):
        trainer = _create_trainer(*NAMES, **options)
        other = _read_values(trainer)
        assert other.keys() == values.keys()
        for name in NAMES:
            assert other[name].dtype == values[name].dtype
            np.testing.assert_allclose(
                other[name], values[name], rtol=1e-4, atol=1e-5, err_msg=f"{options}: {name}"
            )
        # TensorFlow keeps int32 on the CPU, where a program of a GPU cannot reach it.
        if "fuse_steps" in options:
            kept = [variable.dtype for variable in trainer.train_tensors.value_variables]
            assert len(kept) == len(NAMES)
            assert tf.int32 not in kept


def test_replicas_concatenate_tensors_and_average_scalars(asked_trainer: Trainer) -> None:
    mirrored = _create_trainer(*NAMES[1:], count=2, evaluate=True, metrics=[MEAN])
    first = asked_trainer.train_tensors.values

    second = _read_values(mirrored)

    for name in ("hidden", "cost", "top"):
        np.testing.assert_allclose(second[name], first[name], rtol=1e-4, atol=1e-5, err_msg=name)

    assert second["first_label"] == (first["labels"][0] + first["labels"][4]) / 2


def test_a_metric_is_updated_with_a_tensor_in_both_steps() -> None:
    trainer = _create_trainer("top", evaluate=True, metrics=[MEAN], steps_per_loop=1)

    assert "mean_top" in (trainer.validation_metric_names() or ())

    logs = trainer.train(tf.constant(1))
    assert logs["mean_top"] == pytest.approx(trainer.train_tensors.values["top"].mean(), rel=1e-5)

    logs = trainer.evaluate(tf.constant(1))
    assert logs["mean_top"] == pytest.approx(trainer.eval_tensors.values["top"].mean(), rel=1e-5)
    assert not any("tensors" in name for name in logs)


def test_micro_batches_give_the_values_of_the_last_one() -> None:
    whole = _read_labels(1)
    part = _read_values(_create_trainer("labels", "hidden", accumulate_steps=3), 1)

    np.testing.assert_array_equal(part["labels"], whole[-len(part["labels"]) :])
    assert part["hidden"].shape == (2, 3)


def test_several_validation_sets_keep_values_of_their_own() -> None:
    config = linear_experiment().replace(
        task={
            "validation_data": {"dev": {"global_batch_size": 8}, "test": {"global_batch_size": 5}}
        }
    )
    trainer: Trainer = Trainer.create(config, ExposingTask(config.task), train=False, evaluate=True)
    trainer.eval_tensors.request_value("top", "a test")
    own = [
        dataclasses.replace(validation_set, metrics=MetricSet("validation_loss", [], exact=True))
        for validation_set in trainer.validation
    ]
    for sets in (trainer.validation, ValidationSets(own)):
        trainer.set_validation_sets(sets)
        trainer.evaluate(tf.constant(2))
        assert {
            name: values["top"].shape for name, values in trainer.eval_tensors.values.items()
        } == {
            "dev": (8,),
            "test": (5,),
        }


class IntegerTask(LinearTask):
    """Exposes an integer in a step of evaluation."""

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        tk.expose("value", tf.constant(3))
        return super().validation_step(inputs, model, metrics)


class FractionsTask(LinearTask):
    """Exposes fractions by the same name."""

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        tk.expose("value", tf.constant([0.25, 0.75]))
        return super().validation_step(inputs, model, metrics)


def test_validation_sets_may_expose_other_dtypes_by_one_name() -> None:
    config = linear_experiment()
    trainer: Trainer = Trainer.create(config, IntegerTask(config.task), train=False, evaluate=True)
    trainer.eval_tensors.request_value("value", "a test")
    (only,) = trainer.validation
    tasks = {"whole": IntegerTask(config.task), "parts": FractionsTask(config.task)}
    trainer.set_validation_sets(
        ValidationSets(
            [dataclasses.replace(only, name=name, task=task) for name, task in tasks.items()]
        )
    )
    for _ in range(2):
        trainer.evaluate(tf.constant(1))
        values = trainer.eval_tensors.values
        assert values["whole"]["value"].dtype == np.int32
        assert values["whole"]["value"] == 3
        np.testing.assert_array_equal(values["parts"]["value"], [0.25, 0.75])


def test_fused_steps_need_tensors_of_a_known_shape() -> None:
    class DatasetTask(ExposingTask):
        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            return tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).repeat().batch(8)

    config = linear_experiment(fuse_steps=5)
    trainer: Trainer = Trainer.create(config, DatasetTask(config.task), train=True, evaluate=False)
    trainer.train_tensors.request_value("hidden", "a test")

    with pytest.raises(
        UsageError, match=r"a test: the tensor 'hidden' has the shape \(None, 3\), and fused steps"
    ):
        trainer.train(tf.constant(5))


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (
            ("hiden",),
            {},
            (
                r"a test: the training step exposes no tensor 'hiden', and no layer .* did you "
                r"mean hidden\?"
            ),
        ),
        (
            ("zz",),
            {},
            r"no tensor 'zz'.*; there are: cost, first_label, hidden, labels, \w+, top$",
        ),
        (
            (),
            {"metrics": [{**MEAN, "tensor": "tip"}]},
            r"trainer\.metrics\[0\]: the training step .* did you mean top",
        ),
        (
            (),
            {"metrics": [MEAN, MEAN]},
            r"trainer\.metrics\[1\]: another metric is called 'mean_top' too",
        ),
    ],
)
def test_a_miss_names_who_asks_and_what_there_is(names: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _read_values(_create_trainer(*names, **options))


def test_a_tensor_cannot_be_asked_for_after_the_first_step(plain: Trainer) -> None:
    assert dict(plain.train_tensors.values) == {}

    with pytest.raises(
        UsageError, match="the tensor 'top' is asked for after the first training step; ask before"
    ):
        plain.train_tensors.request_value("top", "a test")


class FailingTask(LinearTask):
    """Exposes a tensor whose operation fails whenever it runs."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        tk.expose("fails", tf.strings.to_number(tf.strings.as_string(labels) + "x"))
        return super().build_losses(labels, model_outputs, aux_losses)


@pytest.mark.parametrize(
    ("executor", "asks"), [("default", False), ("single_threaded", False), ("default", True)]
)
def test_a_tensor_that_nobody_asks_for_is_not_computed(executor: str, asks: bool) -> None:
    config = linear_experiment().replace(runtime={"executor": executor})
    trainer: Trainer = Trainer.create(config, FailingTask(config.task), train=True, evaluate=True)
    if asks:
        trainer.train_tensors.request_value("fails", "a test")

    with pytest.raises(tf.errors.InvalidArgumentError) if asks else contextlib.nullcontext():
        trainer.train(tf.constant(2))

    trainer.evaluate(tf.constant(2))


def test_values_are_not_in_checkpoints_and_change_no_weight(
    plain: Trainer, asked_trainer: Trainer
) -> None:
    assert_all_close(plain.model.get_weights(), asked_trainer.model.get_weights())
    assert (
        plain.state.step_state.variables.keys() == asked_trainer.state.step_state.variables.keys()
    )
