"""How a loop uses the devices. This machine may have no GPU, so its peak comes from the config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer_kit.telemetry.device_usage import DeviceUsage, read_peak_memory

_WIDTH = 4
_CLASSES = 3
# The products of the layer and its bias, as TensorFlow's profiler counts them.
_EXAMPLE_FLOPS = 2 * _WIDTH * _CLASSES + _CLASSES
_NO_GPU = not tf.config.list_physical_devices("GPU")


def _build_trainer(model: Any, **task: Any) -> Any:
    """The parts of a trainer that the measurement reads."""
    features = tf.TensorSpec([8, _WIDTH], tf.float32)
    labels = tf.TensorSpec([8], tf.int32)
    strategy = tf.distribute.get_strategy()
    return SimpleNamespace(
        model=model, batch_spec=(features, labels), task=SimpleNamespace(**task), strategy=strategy
    )


def _build_dense() -> keras.Model:
    return keras.Sequential([keras.Input((_WIDTH,)), keras.layers.Dense(_CLASSES)])


def test_the_utilisation_is_three_forward_passes_by_the_peak() -> None:
    trainer = _build_trainer(_build_dense())

    fields = DeviceUsage(peak_flops=1e6).measure(trainer, examples_per_second=100.0)

    assert fields["flops_utilization"] == pytest.approx(3 * _EXAMPLE_FLOPS * 100 / 1e6)


def test_replicas_share_the_flops_of_a_step() -> None:
    trainer = _build_trainer(_build_dense())
    trainer.strategy = SimpleNamespace(num_replicas_in_sync=2)

    fields = DeviceUsage(peak_flops=1e6).measure(trainer, examples_per_second=100.0)

    assert fields["flops_utilization"] == pytest.approx(3 * _EXAMPLE_FLOPS * 100 / 2e6)


def test_a_lower_bound_of_the_flops_gives_no_utilisation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recurrent = keras.Sequential(
        [keras.Input((_WIDTH,)), keras.layers.Reshape((_WIDTH, 1)), keras.layers.SimpleRNN(2)]
    )
    trainer = _build_trainer(recurrent)
    usage = DeviceUsage(peak_flops=1e6)

    with caplog.at_level("INFO"):
        fields = [usage.measure(trainer, 100.0) for _ in range(2)]

    assert all("flops_utilization" not in measured for measured in fields)
    assert caplog.text.count("model FLOPs utilisation is not reported: a lower bound") == 1


def test_the_tokens_are_those_that_the_task_says() -> None:
    trainer = _build_trainer(_build_dense(), tokens_per_example=128)

    fields = DeviceUsage().measure(trainer, examples_per_second=10.0)

    assert fields["tokens_per_second"] == 1280.0


@pytest.mark.skipif(not _NO_GPU, reason="a GPU reports its memory, and may be in the table")
def test_a_machine_without_gpus_reports_nothing() -> None:
    trainer = _build_trainer(_build_dense())

    assert read_peak_memory() is None
    assert DeviceUsage().measure(trainer, examples_per_second=10.0) == {}
