"""Measures how a training loop uses the devices: FLOPs, memory and tokens.

The peak rates of GPUs are those of the makers' data sheets, for dense matrices. Where a sheet
states only the rate with sparsity, the table has half of it. The sources are:

- H200, H100 (SXM, NVL, PCIe), A100, L40S, L4, T4, V100, A10: the data sheet of each at nvidia.com.
- RTX 4090: "NVIDIA Ada GPU Architecture" (white paper), with sums in float32.
- RTX 3090: "NVIDIA Ampere GA102 GPU Architecture" (white paper), with sums in float32.

A part of a GPU (MIG), a laptop's GPU and other variants have other names and other rates. They are
not in the table, and `runtime.peak_flops` of the config states their rate.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import tensorflow as tf

from trainer_kit.telemetry.flops import FlopsResult, count_example_flops

# A step computes the forward pass, and in the backward pass the gradients of the inputs and of the
# weights of each product.
_PASSES = 3
# The dtype tensor_float32 is float32 whose products may use TensorFloat-32. GPUs without it compute
# in float32.
_DTYPES = ("bfloat16", "float16", "tensor_float32", "float32")
# Teraflops for each dtype, by the name that the driver reports without maker and series. 0 where
# the GPU has no such mode.
_TERAFLOPS = {
    r"H200": (989.5, 989.5, 494.5, 67.0),
    r"H200 NVL": (835.5, 835.5, 417.5, 60.0),
    r"H100 80GB HBM3": (989.5, 989.5, 494.5, 67.0),
    r"H100 NVL": (835.5, 835.5, 417.5, 60.0),
    r"H100 PCIe": (756.5, 756.5, 378.0, 51.0),
    r"A100-(SXM4|PCIE)-\d+GB": (312.0, 312.0, 156.0, 19.5),
    r"A100 80GB PCIe": (312.0, 312.0, 156.0, 19.5),
    r"L40S": (362.0, 362.0, 183.0, 91.6),
    r"L4": (121.0, 121.0, 60.0, 30.3),
    r"A10": (125.0, 125.0, 62.5, 31.2),
    r"T4": (0.0, 65.0, 8.1, 8.1),
    r"V100-SXM[23]-\d+GB": (0.0, 125.0, 15.7, 15.7),
    r"V100-PCIE-\d+GB": (0.0, 112.0, 14.0, 14.0),
    r"RTX 4090": (165.2, 165.2, 82.6, 82.6),
    r"RTX 3090": (71.0, 71.0, 35.6, 35.6),
}
_LOG = logging.getLogger(__name__)


class DeviceUsage:
    """Measures the use of the devices after each training loop. Runs eagerly, on the host.

    The utilisation counts the model FLOPs of a step: three times those of the forward pass.
    Recomputed activations and metrics do not count. If the FLOPs of the model are not known, or
    only a lower bound of them, no utilisation is reported.

    Args:
      peak_flops: The peak rate of one device from the config, in FLOPs per second. None looks it up
        by the name of the GPU.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self._peak_flops = peak_flops
        self._flops: FlopsResult | None = None

    def measure(self, trainer: Any, examples_per_second: float | None) -> dict[str, float | None]:
        """Returns the DEVICE_USAGE_FIELDS of a report. Unknown ones are None or missing.

        Args:
          trainer: The trainer of the run.
          examples_per_second: The speed of the loop. None if it is not known.
        """
        fields: dict[str, float | None] = {"peak_memory_bytes": read_peak_memory()}
        if examples_per_second is None:
            return fields

        task = getattr(trainer, "task", None)
        tokens = getattr(task, "tokens_per_example", 0)
        if tokens:
            fields["tokens_per_second"] = tokens * examples_per_second
        peak = self._peak_flops or _find_gpu_peak(trainer)
        # A step of a GAN trains several models, and only its generator is counted.
        if peak is None or hasattr(trainer.model, "latents_spec"):
            return fields

        # The model is traced once, for the first report.
        if self._flops is None:
            self._flops = count_example_flops(trainer)
            if self._flops.problem:
                _LOG.info("model FLOPs utilisation is not reported: %s", self._flops.problem)
        flops = self._flops
        if flops.flops is not None and not flops.problem:
            step_flops = _PASSES * flops.flops
            replicas = trainer.strategy.num_replicas_in_sync
            total_peak = peak * replicas
            fields["flops_utilization"] = step_flops * examples_per_second / total_peak
        return fields


def reset_peak_memory() -> None:
    """Makes `read_peak_memory` count from now on. The memory in use still counts."""
    for name in _list_gpu_names():
        tf.config.experimental.reset_memory_stats(name)


def read_peak_memory() -> int | None:
    """Returns the most bytes that one GPU of this process has used since the last reset.

    Returns None without GPUs, since TensorFlow does not count the memory of CPUs.
    """
    peaks = []
    for name in _list_gpu_names():
        info = tf.config.experimental.get_memory_info(name)
        peaks.append(info["peak"])
    return max(peaks, default=None)


def _list_gpu_names() -> list[str]:
    # The logical devices of a cluster include those of other workers, whose memory is not readable.
    gpus = tf.config.get_visible_devices("GPU")
    return [f"GPU:{number}" for number in range(len(gpus))]


def find_peak_flops(device_name: str, dtype: str) -> float | None:
    """Returns the peak rate of one GPU for products of matrices, in FLOPs per second.

    Args:
      device_name: The name that the driver reports, such as "NVIDIA A100-SXM4-40GB".
      dtype: The dtype of computation: bfloat16, float16, float32, or tensor_float32 for float32
        with TensorFloat-32, which is TensorFlow's default on GPUs that have it.

    Returns:
      The rate. None if the GPU is not in the table, or has no such mode.
    """
    name = re.sub(r"^((NVIDIA|Tesla|GeForce) )+", "", device_name)
    for pattern, teraflops in _TERAFLOPS.items():
        if re.fullmatch(pattern, name):
            rates = dict(zip(_DTYPES, teraflops, strict=True))
            rate = rates.get(dtype, 0.0)
            return 1e12 * rate or None
    return None


def _find_gpu_peak(trainer: Any) -> float | None:
    """Returns the peak rate of the first GPU in the dtype of the trainer's model.

    Returns None without a GPU, and if the rate is not known.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return None
    # Keras 3 and tf_keras have a dtype policy each, but a model knows its own.
    dtype = getattr(trainer.model, "compute_dtype", "float32")
    if dtype == "float32" and tf.config.experimental.tensor_float_32_execution_enabled():
        dtype = "tensor_float32"
    details = tf.config.experimental.get_device_details(gpus[0])
    return find_peak_flops(details.get("device_name", ""), dtype)
