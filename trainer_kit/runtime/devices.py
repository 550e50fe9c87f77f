"""Sets TensorFlow's devices, threads and execution, before the strategy is created."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, Mistake

_LOG = logging.getLogger(__name__)

IMPORT_TIME_ADVICE = "make variables and tensors in build_model, not when a module is imported"

# TensorFlow's own default.
THREADS_PER_GPU = 2

# M_ARENA_MAX of glibc's mallopt.
_ARENA_MAX = -8

# As many as glibc allows on 8 cores.
_ARENA_COUNT = 64


def configure_devices(
    runtime: RuntimeConfig, recorded_thread_counts: Mapping[str, int] | None = None
) -> None:
    """Sets up devices as `runtime` says; runs eagerly, on the host, before TensorFlow is used.

    It increases the limit of memory arenas, splits the CPU (virtual_cpus), lets GPUs grow their
    memory, sets TF_GPU_THREAD_MODE and TF_GPU_THREAD_COUNT and cuDNN's batch normalisation, and
    runs functions eagerly or with deterministic ops when asked.

    May be called again. TensorFlow cannot undo deterministic ops nor join CPUs again in one
    process: more CPUs than asked for are fine, the rest stays idle.

    Args:
      runtime: The config's section runtime.
      recorded_thread_counts: The thread counts at the run's first start, as `get_thread_counts`
        returned them.

    Raises:
      ConfigError: when TensorFlow is already in use with fewer virtual CPUs than asked for.
    """
    if runtime.gpu_thread_mode:
        os.environ["TF_GPU_THREAD_MODE"] = runtime.gpu_thread_mode
        os.environ["TF_GPU_THREAD_COUNT"] = str(runtime.per_gpu_thread_count or THREADS_PER_GPU)
    if runtime.batchnorm_spatial_persistent:
        os.environ["TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"] = "1"

    _set_threads(runtime, recorded_thread_counts or {})
    _raise_arena_limit()
    _split_cpu(runtime.virtual_cpus)

    for gpu in tf.config.list_physical_devices("GPU"):
        # The user has limited the memory of this GPU.
        if tf.config.get_logical_device_configuration(gpu):
            continue
        try:
            # Without growth one process takes all memory of all GPUs.
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            _LOG.info("%s keeps its memory setting: TensorFlow is already in use", gpu.name)

    tf.config.run_functions_eagerly(runtime.run_eagerly)
    if runtime.deterministic_ops:
        tf.config.experimental.enable_op_determinism()


def get_thread_counts() -> dict[str, int]:
    """Returns TensorFlow's thread counts, for the record of a run.

    0 means as many as TensorFlow chooses.
    """
    threading = tf.config.threading
    return {
        "inter_op": threading.get_inter_op_parallelism_threads(),
        "intra_op": threading.get_intra_op_parallelism_threads(),
    }


def _set_threads(runtime: RuntimeConfig, recorded_counts: Mapping[str, int]) -> None:
    # macOS has no affinities.
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))

    threading = tf.config.threading
    current_counts = get_thread_counts()
    for name, requested, set_count in (
        ("inter_op", runtime.inter_op_threads, threading.set_inter_op_parallelism_threads),
        ("intra_op", runtime.intra_op_threads, threading.set_intra_op_parallelism_threads),
    ):
        count = requested or recorded_counts.get(name, 0) or cores
        if count == current_counts[name]:
            continue
        try:
            set_count(count)
        except RuntimeError:
            # TensorFlow is in use in this process.
            if requested or recorded_counts.get(name):
                _LOG.warning(
                    "%s threads stay at %d, not %d: TensorFlow is already in use",
                    name,
                    current_counts[name],
                    count,
                )


def _raise_arena_limit() -> None:
    """Lets glibc's malloc use up to 64 arenas, unless the environment sets a limit.

    glibc allows 8 arenas per core, and on a small machine TensorFlow has more threads than that.
    Two threads that share an arena wait for each other at each allocation. On 2 cores the same
    fused training ran at 18,000 steps per second when the data thread and the step thread shared an
    arena, and at 28,000 when they did not (TensorFlow 2.20, glibc 2.36). The call has no effect
    once glibc has reached its own limit.
    """
    # The user's own limit stays.
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in tunables
    # glibc counts all cores, whatever the affinity.
    glibc_limit = (os.cpu_count() or 1) * 8
    if not is_set and glibc_limit < _ARENA_COUNT:
        # Other C libraries, which have no such limit, have no mallopt.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
        mallopt(_ARENA_MAX, _ARENA_COUNT)


def _split_cpu(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    current_count = len(tf.config.get_logical_device_configuration(cpu) or (None,))
    if current_count >= count:
        return

    configurations = [tf.config.LogicalDeviceConfiguration()] * count
    try:
        tf.config.set_logical_device_configuration(cpu, configurations)
    except RuntimeError as error:
        mistake = Mistake(
            "runtime.virtual_cpus",
            f"TensorFlow is already in use in this process, with {current_count} CPU device(s)"
            f" instead of {count}",
            f"{IMPORT_TIME_ADVICE}; in your own program call configure_devices before any other use"
            " of TensorFlow, or run this in a new process",
        )
        raise ConfigError([mistake]) from error


def has_only_cpus() -> bool:
    """Whether TensorFlow has no other devices than CPUs on this host."""
    return {device.device_type for device in tf.config.list_logical_devices()} <= {"CPU"}
