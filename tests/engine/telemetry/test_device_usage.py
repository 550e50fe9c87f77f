"""How a loop uses the devices. This machine may have no GPU, so tests state or imitate one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.run.launcher import launch
from trainer_kit.telemetry.device_usage import (
    DeviceUsage,
    find_peak_flops,
    read_peak_memory,
    reset_peak_memory,
)
from trainer_kit.telemetry.metrics_jsonl import read_last_report
from trainer_kit.testing import tiny_experiment

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
    fields = DeviceUsage().measure(trainer, examples_per_second=10.0)
    assert fields == {"peak_memory_bytes": None}


class _Gpus:
    """Two GPUs, as TensorFlow's public functions show them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.peaks = {"GPU:0": 3000, "GPU:1": 5000}
        devices = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(2)]
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: devices)
        experimental = tf.config.experimental
        monkeypatch.setattr(experimental, "get_device_details", lambda _: {"device_name": name})
        monkeypatch.setattr(experimental, "get_memory_info", lambda gpu: {"peak": self.peaks[gpu]})
        monkeypatch.setattr(experimental, "reset_memory_stats", self._reset)

    def _reset(self, gpu: str) -> None:
        assert gpu in self.peaks
        self.peaks[gpu] = 1000


def test_the_peak_memory_is_the_largest_since_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _Gpus(monkeypatch, "NVIDIA H200")
    assert read_peak_memory() == 5000

    reset_peak_memory()
    gpus.peaks["GPU:0"] = 2000

    assert read_peak_memory() == 2000


def test_a_run_reports_the_peak_memory_since_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Gpus(monkeypatch, "NVIDIA H200")

    launch(tiny_experiment(train_steps=5), "train", str(tmp_path))

    report = read_last_report(tmp_path / "metrics.jsonl", "train")
    assert report is not None
    assert report["peak_memory_bytes"] == 1000
    assert 0 < report["flops_utilization"] < 1


def test_the_peak_rate_is_that_of_the_dtype_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _Gpus(monkeypatch, "NVIDIA H200")
    trainer = _build_trainer(_build_dense())
    # The policy of tf_keras is not that of Keras 3.
    policy = tf_keras.mixed_precision.global_policy()
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        layer = tf_keras.layers.Dense(_CLASSES)
        mixed_model = tf_keras.Sequential([tf_keras.Input((_WIDTH,)), layer])
    finally:
        tf_keras.mixed_precision.set_global_policy(policy)
    mixed_trainer = _build_trainer(mixed_model)

    fields = DeviceUsage().measure(trainer, examples_per_second=100.0)
    mixed_fields = DeviceUsage().measure(mixed_trainer, examples_per_second=100.0)

    step_flops = 3 * _EXAMPLE_FLOPS * 100
    assert fields["flops_utilization"] == pytest.approx(step_flops / 494.5e12)
    assert mixed_fields["flops_utilization"] == pytest.approx(step_flops / 989.5e12)
    assert fields["peak_memory_bytes"] == 5000


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA H100 80GB HBM3", "tensor_float32", 494.5),
        ("NVIDIA H100 PCIe", "float16", 756.5),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312.0),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA L40S", "bfloat16", 362.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("Tesla T4", "float16", 65.0),
        # Without TensorFloat-32 products are computed in float32.
        ("Tesla T4", "tensor_float32", 8.1),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA GeForce RTX 3090", "float32", 35.6),
    ],
)
def test_the_peak_of_a_gpu_depends_on_the_dtype(name: str, dtype: str, teraflops: float) -> None:
    assert find_peak_flops(name, dtype) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla T4", "bfloat16"),
        ("NVIDIA H200", "float64"),
        ("NVIDIA A10G", "bfloat16"),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("", "float32"),
    ],
)
def test_the_peak_of_other_gpus_and_modes_is_not_known(name: str, dtype: str) -> None:
    assert find_peak_flops(name, dtype) is None
