"""Errors that say what was given, what is allowed, and which names are near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import trainer_kit as tk
from tests.builders import input_context, optimization, replicas, training_data, validation_data
from tests.engine.inputs.one_replica import OneReplica
from trainer_kit.callbacks.callback import Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.config.schema.optimization import EMAConfig, OptimizationConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.dataset_iterator import ValidationData
from trainer_kit.inputs.dataset_resume import ResumePolicy
from trainer_kit.inputs.fused_batches import stack_batches
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.inputs.sources.tfrecord_index import find_matching_files
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.optimizers.factory import create_optimizer
from trainer_kit.optimizers.gradients import apply_gradients, scale_loss
from trainer_kit.optimizers.learning_rate import create_learning_rate
from trainer_kit.optimizers.moving_average import MovingAverage
from trainer_kit.runtime.determinism import seed_everything


def augment(x: Any, y: Any) -> Any:
    """As for a plain dataset of pairs."""
    return x, y


class WithoutLogs(tk.Callback):
    """Forgets a parameter."""

    def loop_end(self, run: Any) -> None:  # type: ignore[override]
        """Does nothing."""


def source(params: tk.DataConfig, arrays: Any = None, **options: Any) -> tk.ArraySource:
    """Returns a source of eleven numbers, or of other arrays."""
    return tk.ArraySource(np.arange(11) if arrays is None else arrays, params, **options)


def leave_a_batch_out() -> None:
    """Of a dataset that is ready-made."""
    ready_made = tf.data.Dataset.range(9).batch(4)
    TrainData(None, None, ResumePolicy(), tf.Variable(0, dtype=tf.int64), ready_made).skip_batch(2)


def apply_outside_of_a_replica() -> None:
    """In the scope of a strategy, but not in its `run`."""
    with replicas(2).scope():
        apply_gradients(
            create_optimizer(optimization("sgd")), [(tf.constant(1.0), keras.Variable(1.0))]
        )


def average_in_another_strategy() -> None:
    """Of a variable of two replicas."""
    with replicas(2).scope():
        weights = keras.Variable([1.0])
    MovingAverage([weights], EMAConfig())


def exclude_by_a_broken_pattern() -> None:
    """Without the closing bracket."""
    create_optimizer(
        optimization("adamw", weight_decay_rate=0.5, exclude_from_weight_decay=("norm(",))
    )


MESSAGES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no optimizer": (
        lambda: create_optimizer(OptimizationConfig()),
        UsageError,
        "to one of sgd, adam, adamw, lamb, rmsprop, adagrad, adafactor",
    ),
    "no learning rate": (
        lambda: create_learning_rate(OptimizationConfig()),
        UsageError,
        r"learning_rate\.type to one of constant, .*step_cosine_with_offset",
    ),
    "a loss scale": (
        lambda: create_optimizer(
            optimization("sgd"), mixed_precision_dtype="float16", loss_scale="fixed"
        ),
        UsageError,
        "'fixed'; give 'dynamic' or a number above 0",
    ),
    "no gradient": (
        lambda: apply_gradients(
            keras.optimizers.SGD(), [(None, keras.Variable(1.0, name=name)) for name in "ab"]
        ),
        UsageError,
        r"no variable has a gradient \(of: a, b\); compute the loss .* GradientTape",
    ),
    "gradients outside of a replica": (
        apply_outside_of_a_replica,
        UsageError,
        r"inside strategy\.run",
    ),
    "a loss scale of tf_keras": (
        lambda: scale_loss(
            tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD()), tf.constant(2.0)
        ),
        UsageError,
        r"is of tf_keras; scale the loss with trainer_kit\.optimizers",
    ),
    "nothing to average": (
        lambda: MovingAverage([], EMAConfig()),
        UsageError,
        "no variables to average; build the model first",
    ),
    "an average in another strategy": (
        average_in_another_strategy,
        UsageError,
        "to another strategy; make the average in the scope of that strategy",
    ),
    "a pattern": (
        exclude_by_a_broken_pattern,
        UsageError,
        r"'norm\(' is not a regular expression .* use 'norm",
    ),
    "arrays of other lengths": (
        lambda: source(training_data(1), (np.zeros(3), np.zeros((4, 2)))),
        DataError,
        r"differ in their number of examples.*shapes \[\(3,\), \(4, 2\)\]",
    ),
    "no arrays": (lambda: source(training_data(1), [1, 2, 3]), DataError, "got a list of shapes"),
    "a batch of nothing": (
        lambda: source(training_data(0)),
        UsageError,
        "global_batch_size is 0; set it in the data's section",
    ),
    "a batch larger than an epoch": (
        lambda: source(training_data(12)),
        DataError,
        r"is 12, but there are 11 examples.*set it to 11 or less$",
    ),
    "a batch larger than a pass": (
        lambda: source(validation_data(12, drop_remainder=True)),
        DataError,
        "set it to 11 or less, or drop_remainder to false",
    ),
    "a batch that replicas cannot share": (
        lambda: source(training_data(6)).at(0, input_context(4)),
        UsageError,
        r"batch 6 on 4 replicas leaves 2 over; .*equally: 4 or 8$",
    ),
    "an algorithm": (
        lambda: source(training_data(autotune_algorithm="hil_climb")),
        UsageError,
        "autotune_algorithm: 'hil_climb' is not an .*did you mean hill_climb",
    ),
    "no data": (
        lambda: call_build_inputs(lambda params: {}, None),
        UsageError,
        r"returned a dict; return a tf\.data\.Dataset or a Source",
    ),
    "a function of two arguments": (
        lambda: source(training_data(), transform=augment),
        UsageError,
        "one argument, the structure.*`x, y = batch`.*parameter named `seed`",
    ),
    "a dict of patterns": (
        lambda: find_matching_files({"images": "a*"}),  # type: ignore[arg-type]
        UsageError,
        "takes a path or glob.*it got .*one source for each name of a dict",
    ),
    "remote files": (
        lambda: find_matching_files("gs://b/a*"),
        UsageError,
        r"gs://b/a\* is remote.*copy the files",
    ),
    "an empty dataset": (
        lambda: ValidationData(
            "validation_data", OneReplica(), None, tf.data.Dataset.range(0)
        ).check_not_empty(),
        DataError,
        r"^task\.validation_data has no batch: .* fewer examples than a batch",
    ),
    "an endless dataset": (
        lambda: ValidationData(
            "validation_data", OneReplica(), None, tf.data.Dataset.range(3).repeat()
        ).check_has_end("x"),
        DataError,
        "validation_data never ends",
    ),
    "strings in fused steps": (
        lambda: stack_batches(
            tf.data.Dataset.from_tensor_slices(["a", "b"]).batch(1, drop_remainder=True), 2
        ),
        UsageError,
        r"string tensors, which XLA does not take; set trainer\.fuse_steps to 1",
    ),
    "a batch of a ready-made dataset": (
        leave_a_batch_out,
        UsageError,
        "recovery_policy=skip cannot leave out a batch of a ready-made dataset",
    ),
    "a callback that forgets a parameter": (
        lambda: CallbackList(Run(None), [WithoutLogs()]),
        UsageError,
        (
            r"callback WithoutLogs: loop_end is called with \(run, logs\): .*declare it as "
            r"loop_end\(self, run, logs\) "
        ),
    ),
    "a seed": (
        lambda: seed_everything(-1),
        UsageError,
        r"runtime\.random_seed: -1 is not a seed; use 0 to 4294967295",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_an_error_says_what_to_do(name: str) -> None:
    act, error, message = MESSAGES[name]
    with pytest.raises(error, match=message):
        act()
