"""Measures how a training loop uses the devices: FLOPs, memory and tokens."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.telemetry.flops import FlopsResult, count_example_flops
from trainer_kit.telemetry.peak_flops import find_peak_flops

# A step computes the forward pass, and in the backward pass the gradients of the inputs and of the
# weights of each product.
_PASSES = 3
_LOG = logging.getLogger(__name__)


class DeviceUsage:
    """Measures the use of the devices after each training loop. Runs eagerly, on the host.

    The utilisation counts the model FLOPs of a step: three times those of the forward pass. What a
    step computes again, or for metrics, is not in them. Where the FLOPs of the model are not known,
    or are only a lower bound, no utilisation is reported.

    Args:
      peak_flops: The peak rate of one device from the config, in FLOPs per second. None looks it up
        by the name of the GPU.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self._peak_flops = peak_flops
        self._flops: FlopsResult | None = None

    def measure(self, trainer: Any, examples_per_second: float | None) -> dict[str, float]:
        """Returns the MACHINE_FIELDS of a report that are known.

        Args:
          trainer: The trainer of the run.
          examples_per_second: The speed of the loop. None if it is not known.
        """
        fields: dict[str, float] = {}
        memory = read_peak_memory()
        if memory is not None:
            fields["peak_memory_bytes"] = memory
        if examples_per_second is None:
            return fields

        task = getattr(trainer, "task", None)
        tokens = getattr(task, "tokens_per_example", 0)
        if tokens:
            fields["tokens_per_second"] = tokens * examples_per_second
        peak = self._peak_flops or _find_gpu_peak()
        # A step of a GAN trains several models, and only its generator is counted.
        if peak is None or hasattr(trainer.model, "latents_spec"):
            return fields

        # The model is traced once, for the first report.
        flops = self._flops
        if flops is None:
            flops = count_example_flops(trainer)
            self._flops = flops
            if flops.problem:
                _LOG.info("model FLOPs utilisation is not reported: %s", flops.problem)
        if flops.flops is not None and not flops.problem:
            step_flops = _PASSES * flops.flops
            replicas = trainer.strategy.num_replicas_in_sync
            total_peak = peak * replicas
            fields["flops_utilization"] = step_flops * examples_per_second / total_peak
        return fields


def read_peak_memory() -> int | None:
    """Returns the most bytes that one GPU has used since this process began or reset it.

    Returns None without GPUs, since TensorFlow does not count the memory of CPUs.
    """
    peaks = []
    for device in tf.config.list_logical_devices("GPU"):
        name = device.name.removeprefix("/device:")
        info = tf.config.experimental.get_memory_info(name)
        peaks.append(info["peak"])
    return max(peaks, default=None)


def _find_gpu_peak() -> float | None:
    """Returns the peak rate of the first GPU. None without one, or if its rate is not known."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    details = tf.config.experimental.get_device_details(gpus[0])
    name = details.get("device_name", "")
    policy = keras.config.dtype_policy()
    dtype = policy.compute_dtype
    uses_tensor_float_32 = tf.config.experimental.tensor_float_32_execution_enabled()
    if dtype == "float32" and uses_tensor_float_32:
        dtype = "tensor_float32"
    return find_peak_flops(name, dtype)
