"""What is refused when a trainer is made, or its training step is traced."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from tests.engine.linear_task import linear_experiment
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import UsageError
from trainer_kit.training.checks import model_and_config
from trainer_kit.training.checks.model_and_config import (
    check_deterministic_kernels,
    check_exact_resume,
    check_model,
    check_sections,
    warn_about_slow_convolutions,
)


@pytest.mark.parametrize("name", ["trainer", "task", "runtime"])
def test_a_config_without_a_section_is_refused(name: str) -> None:
    sections = {"trainer": 1, "task": 1, "runtime": 1}
    del sections[name]

    with pytest.raises(AttributeError, match=f"a section '{name}'"):
        check_sections(SimpleNamespace(**sections), False, False)


@pytest.mark.parametrize("name", ["train_data", "validation_data"])
def test_data_is_needed_unless_a_dataset_was_given(name: str) -> None:
    config = SimpleNamespace(trainer=1, runtime=1, task=SimpleNamespace())

    with pytest.raises(AttributeError, match=rf"'task\.{name}', or a ready-made dataset"):
        check_sections(config, name == "train_data", name == "validation_data")

    check_sections(config, False, False)
    check_sections(linear_experiment(), True, True)


def test_a_model_without_variables_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"Module has no variables yet; build it in build_model"):
        check_model(tf.Module(), RuntimeConfig(), tf.distribute.get_strategy())


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ({"enable_xla": True}, "enable_xla needs one replica, and there are 2"),
        (
            {"executor": "single_threaded"},
            "one device only, and there are 2 replicas; set executor=default",
        ),
    ],
)
def test_what_needs_one_replica_is_refused_on_several(
    runtime: dict[str, Any], message: str
) -> None:
    model = tf.Module()
    config = RuntimeConfig(**runtime)
    replicas = SimpleNamespace(num_replicas_in_sync=2)
    model.weight = tf.Variable(1.0)

    with pytest.raises(UsageError, match=message):
        check_model(model, config, replicas)

    check_model(model, RuntimeConfig(), replicas)
    check_model(model, config, tf.distribute.get_strategy())


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda: tf.random.uniform([]), "RandomUniform"),
        (lambda: tf.random.shuffle(tf.range(3))[0], "RandomShuffle"),
        (lambda: tf.nn.dropout(tf.ones([3]), 0.5), "RandomUniform"),
        (lambda: tf.py_function(lambda: 1.0, [], tf.float32), "EagerPyFunc"),
    ],
)
def test_unsaved_state_in_a_loop_is_a_warning_or_an_error(
    draw: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    @tf.function
    def loop() -> tf.Tensor:
        for _ in tf.range(2):
            draw()
        return tf.constant(0)

    graph = loop.get_concrete_function().graph

    with caplog.at_level(logging.WARNING, "trainer_kit"):
        check_exact_resume(graph, required=False)

    assert f"the training step uses {named}, whose state is not in a checkpoint" in caplog.text

    with pytest.raises(
        UsageError, match=f"trainer.require_exact_resume: the training step uses {named}"
    ):
        check_exact_resume(graph, required=True)


def test_generators_with_a_state_of_their_own_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    generator = tf.random.Generator.from_seed(1)
    layer = keras.layers.Dropout(0.5, seed=1)

    @tf.function
    def loop() -> Any:
        return (
            generator.uniform([])
            + tf.reduce_sum(layer(tf.ones([3]), training=True))
            + tf.random.stateless_normal([], [1, 2])
        )

    check_exact_resume(loop.get_concrete_function().graph, required=True)

    assert caplog.text == ""


def test_a_recurrent_layer_without_dropout_draws_nothing(caplog: pytest.LogCaptureFixture) -> None:
    layer = tf_keras.layers.LSTM(2)
    graph = tf.function(layer).get_concrete_function(tf.zeros((2, 3, 4))).graph

    check_exact_resume(graph, required=True)

    assert "CudnnRNN" in str(graph.as_graph_def())
    assert not caplog.records


def test_fused_convolutions_on_a_cpu_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for layer, told in ((keras.layers.Dense(2), False), (keras.layers.Conv1D(2, 2), True)):
        step = tf.function(tf.function(layer, jit_compile=True), autograph=False)
        warn_about_slow_convolutions(step.get_concrete_function(tf.TensorSpec([2, 4, 3])).graph)
        assert ("convolutions" in caplog.text) is told


@pytest.mark.parametrize("deterministic", [False, True])
def test_exact_resume_on_a_gpu_needs_deterministic_kernels(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind=None: [SimpleNamespace(name="/device:GPU:0")]
    )
    monkeypatch.setattr(model_and_config, "is_op_determinism_enabled", lambda: deterministic)
    refused = (
        contextlib.nullcontext()
        if deterministic
        else pytest.raises(UsageError, match="deterministic_ops=true")
    )

    with caplog.at_level(logging.INFO):
        check_deterministic_kernels(tf.distribute.get_strategy(), required=False)

    assert ("a resumed run may differ" in caplog.text) is not deterministic

    with refused:
        check_deterministic_kernels(tf.distribute.get_strategy(), required=True)

    check_deterministic_kernels(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), required=True)
