"""Several runs in one process, each as in a new one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tf_keras

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.run.finetune import forget_models


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


def _build_model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])


def test_a_second_model_has_the_names_and_weights_of_the_first() -> None:
    models = []

    for others in (0, 1, 3):
        for _ in range(others):
            _build_model()(np.ones((2, 4)), training=True)
        forget_models(RuntimeConfig(random_seed=3))
        model = _build_model()
        values = [variable.numpy().tolist() for variable in model.variables]
        output = model(np.ones((2, 4)), training=True).numpy().tolist()
        models.append(
            (
                [variable.path for variable in model.variables],
                values,
                output,
                tf_keras.layers.Dense(1).name,
            )
        )

    assert models[0] == models[1] == models[2]


def test_a_model_that_nobody_refers_to_is_gone() -> None:
    model = weakref.ref(_build_model())

    forget_models(RuntimeConfig())
    gc.collect()

    assert model() is None


def test_the_policy_is_the_configs_or_the_one_set_before() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    forget_models(RuntimeConfig())

    assert keras.config.dtype_policy().name == "mixed_bfloat16"

    forget_models(RuntimeConfig(mixed_precision_dtype="float32"))

    assert keras.config.dtype_policy().name == "float32"
