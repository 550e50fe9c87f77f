"""tf.data's tuner where there is something to tune, and where there is nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import training_data
from tests.engine.inputs.one_replica import OneReplica, section_of
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.inputs.autotune_off import disable_idle_autotune
from trainer_kit.inputs.dataset_resume import ResumePolicy
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.inputs.worker_pipeline import build_one_pass


def _build_plain() -> tf.data.Dataset:
    slices = tf.data.Dataset.from_tensor_slices((np.arange(10.0), np.arange(10))).cache()
    return slices.shuffle(10, seed=1).repeat(2).batch(4).prefetch(tf.data.AUTOTUNE)


def test_turning_an_idle_tuner_off_keeps_the_elements() -> None:
    quiet = disable_idle_autotune(_build_plain())

    assert quiet.options().autotune.enabled is False
    assert str(list(quiet.as_numpy_iterator())) == str(list(_build_plain().as_numpy_iterator()))


@pytest.mark.parametrize(
    "transform",
    [
        lambda data: data.map(lambda *parts: parts),
        lambda data: data.batch(2, num_parallel_calls=tf.data.AUTOTUNE),
        lambda data: data.interleave(lambda x, y: tf.data.Dataset.from_tensors(x)),
    ],
)
def test_the_tuner_stays_where_a_number_of_threads_may_be_found(transform: Any) -> None:
    data = transform(_build_plain()).prefetch(1)
    assert disable_idle_autotune(data) is data


def test_the_tuner_stays_on_where_it_adds_the_prefetch() -> None:
    data = _build_plain().unbatch().batch(2)
    assert disable_idle_autotune(data) is data


def test_what_the_user_has_set_stays() -> None:
    tuned = tf.data.Options()
    threads = tf.data.Options()
    tuned.autotune.enabled = True
    threads.threading.max_intra_op_parallelism = 1

    assert (
        disable_idle_autotune(_build_plain().with_options(tuned)).options().autotune.enabled is True
    )

    kept = disable_idle_autotune(_build_plain().with_options(threads)).options()
    assert (kept.autotune.enabled, kept.threading.max_intra_op_parallelism) == (False, 1)


@pytest.mark.parametrize("stack", [1, 3])
def test_only_batches_of_separate_steps_keep_an_idle_tuner(stack: int) -> None:
    def build(params: DataConfig) -> tf.data.Dataset:
        return _build_plain().repeat().prefetch(1) if params.is_training else _build_plain()

    section = section_of(build, training_data())
    policy = ResumePolicy(has_single_iterator=True)
    data = TrainData(OneReplica(), section, policy, tf.Variable(2, dtype=tf.int64))

    data.set_stack_size(stack)

    assert data.dataset.options().autotune.enabled is (None if stack == 1 else False)
    assert build_one_pass(build(DataConfig()), None).options().autotune.enabled is False
