"""The example of sharpness-aware minimization in the guide, against NumPy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from scripts.examples import collect_files, read_pages
from tests.builders import replicas, restore_registries
from trainer_kit.config.experiment_registry import experiments
from trainer_kit.training.trainer import Trainer

RATE = 0.1
RHO = 0.5


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of the example."""
    folder = tmp_path_factory.mktemp("example")
    pages = read_pages()
    page = next(page for page in pages if "sam.py" in page.files)
    for name, text in collect_files(page, pages).items():
        (folder / name).write_text(text)

    with restore_registries(experiments), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(folder)
        yield importlib.import_module("sam")

    del sys.modules["sam"]
    del sys.modules["my_task"]


def _compute_linear_sam(
    weights: list[np.ndarray], x: np.ndarray, y: np.ndarray
) -> list[np.ndarray]:
    """Returns kernel and bias of a logistic regression after a step of SAM, in float64."""

    def gradients(kernel: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
        error = (1 / (1 + np.exp(-(x @ kernel + bias))) - y[:, None]) / len(x)
        return [x.T @ error, error.sum(0)]

    first = gradients(*weights)
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in first))
    second = gradients(*(w + RHO * g / norm for w, g in zip(weights, first, strict=True)))
    return [w - RATE * g for w, g in zip(weights, second, strict=True)]


def test_a_step_on_two_replicas_is_that_of_the_paper(example: Any) -> None:
    class Linear(example.SamTask):  # type: ignore[misc]
        def build_model(self) -> keras.Model:
            return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    sgd = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": RATE}},
    }
    config = example.rings_sam().replace(
        task={"rho": RHO}, trainer={"optimizer_config": sgd, "steps_per_loop": 1}
    )
    strategy = replicas(2)
    with strategy.scope():
        trainer = Trainer.create(config, Linear(config.task), train=True, evaluate=False)

    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    y = np.float32(np.arange(8) % 2)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
    trainer.train_dataset = strategy.experimental_distribute_dataset(data)
    expected = [
        variable.numpy().astype(np.float64) for variable in trainer.model.trainable_variables
    ]

    for _ in range(2):
        trainer.train(tf.constant(1))
        expected = _compute_linear_sam(expected, x, y)

    for variable, value in zip(trainer.model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5, atol=1e-6)
