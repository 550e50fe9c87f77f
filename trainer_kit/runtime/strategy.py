"""Creates the tf.distribute.Strategy that RuntimeConfig asks for."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, Mistake
from trainer_kit.process.watchdog import Watchdog
from trainer_kit.runtime.devices import IMPORT_TIME_ADVICE
from trainer_kit.runtime.rendezvous import wait_for_workers
from trainer_kit.runtime.strategy_choice import (
    TPU_ENV_VARS,
    Machine,
    choose_strategy,
    local_devices,
)
from trainer_kit.runtime.tf_config import read_cluster

_LOG = logging.getLogger(__name__)

# Seconds, the default of trainer.hang_timeout_seconds.
HANG_TIMEOUT = 60 * 60.0

# Seconds. TensorFlow itself waits without a limit.
TPU_CONNECT_TIMEOUT = 10.0


def create_strategy(
    runtime: RuntimeConfig, hang_timeout_seconds: float | None = HANG_TIMEOUT
) -> tf.distribute.Strategy:
    """Returns the strategy that `runtime` asks for.

    Runs eagerly, on the host, after `configure_devices`. One device never pays for mirroring:
    `auto` and `mirrored` over a single device give TensorFlow's default strategy.

    Args:
      runtime: Its distribution_strategy, num_gpus, virtual_cpus, all_reduce_alg, num_packs and tpu
        are used. The workers are those of TF_CONFIG (see `configure_cluster`).
      hang_timeout_seconds: How long to wait for the other workers of a cluster, in seconds. None
        means without a limit.

    Raises:
      ConfigError: when the machine lacks the requested devices. The message names those that it
        has.
      StalledError: when a worker has not answered in time.
    """
    # GPUs that the user has split count as several. Listing them does not start TensorFlow's
    # runtime.
    gpu_count = sum(
        len(tf.config.get_logical_device_configuration(gpu) or (None,))
        for gpu in tf.config.list_physical_devices("GPU")
    )
    machine = Machine(
        gpus=gpu_count,
        tpu_env_var=next((name for name in TPU_ENV_VARS if os.environ.get(name)), ""),
        cluster=read_cluster(),
    )
    policy = choose_strategy(runtime, machine)

    cluster = machine.cluster
    is_multi_worker = cluster is not None and cluster.is_multi_worker
    if policy in ("off", "one_device", "mirrored") and is_multi_worker:
        _LOG.warning("TF_CONFIG is not used: %s trains on this machine alone", policy)

    if policy == "multi_worker_mirrored" and cluster is not None and is_multi_worker:
        _LOG.info(
            "%s %d waits for all %d workers to start",
            cluster.task_type,
            cluster.task_index,
            cluster.worker_count,
        )
        # In a runtime that has started it is too late, and TensorFlow says so at once.
        if not runtime_has_started():
            wait_for_workers(cluster, hang_timeout_seconds)

        # A worker that has answered may be gone when TensorFlow connects, which has no time limit
        # of its own.
        with Watchdog(
            lambda: ("connecting workers", 0),
            tempfile.gettempdir(),
            hang_timeout_seconds,
            last_resort_seconds=5.0,
        ):
            strategy = _create_multi_worker_mirrored(runtime, machine)
    else:
        strategy = _BUILDERS[policy](runtime, machine)

    _LOG.info(
        "distribution_strategy=%s: %s, replicas in sync: %d",
        runtime.distribution_strategy,
        type(strategy).__name__.lstrip("_"),
        strategy.num_replicas_in_sync,
    )
    return strategy


def _create_mirrored(runtime: RuntimeConfig, machine: Machine) -> tf.distribute.Strategy:
    devices = local_devices(runtime, machine)
    if len(devices) == 1:
        _LOG.info("nothing is mirrored, because there is one device: %s", devices[0])
        default = "GPU:0" if machine.gpus else "CPU:0"
        if devices[0] == default:
            return tf.distribute.get_strategy()
        return tf.distribute.OneDeviceStrategy(devices[0])

    # MirroredStrategy takes devices that do not exist, and then fails, or hangs, in the first step.
    kind = devices[0].partition(":")[0]
    logical_count = len(tf.config.list_logical_devices(kind))
    if logical_count < len(devices):
        field = "virtual_cpus" if kind == "CPU" else "num_gpus"
        problem = (
            f"the config requests {len(devices)},"
            f" but TensorFlow has {logical_count} logical {kind} device(s)"
        )
        advice = "call configure_devices before TensorFlow is used"
        raise ConfigError([Mistake(f"runtime.{field}", problem, advice)])

    # TensorFlow's collectives on CPUs allow one group in the life of a process, and are slower.
    if not machine.gpus:
        return tf.distribute.MirroredStrategy(list(devices), tf.distribute.ReductionToOneDevice())

    reducers = {
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    }
    reducer = reducers.get(runtime.all_reduce_alg or "auto")
    return tf.distribute.MirroredStrategy(
        list(devices), reducer and reducer(num_packs=runtime.num_packs)
    )


def runtime_has_started() -> bool:
    """Whether TensorFlow's runtime has started. Starts nothing."""
    # A runtime that has started takes no other number of threads.
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def _create_multi_worker_mirrored(
    runtime: RuntimeConfig, machine: Machine
) -> tf.distribute.Strategy:
    del machine
    implementation = tf.distribute.experimental.CommunicationImplementation(
        (runtime.all_reduce_alg or "auto").upper()
    )
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    try:
        with _allow_interrupts():
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        # Its collective operations have to come first.
        advice = (
            f"{IMPORT_TIME_ADVICE}; in your own program create the strategy"
            " before any other use of TensorFlow, or in a new process"
        )
        raise _build_strategy_error("multi_worker_mirrored", error, advice) from error
    except tf.errors.OpError as error:
        advice = (
            "check that this worker's address is of this machine, that its port is free, and that"
            " all workers run"
        )
        raise _build_strategy_error("multi_worker_mirrored", error, advice) from error


@contextlib.contextmanager
def _allow_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end a process while TensorFlow, holding Python's lock, connects the workers.

    TensorFlow takes SIGTERM as well, permanently, and does nothing when the signal comes.
    Afterwards the previous handlers are restored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.getsignal(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _create_tpu(runtime: RuntimeConfig, machine: Machine) -> tf.distribute.Strategy:
    address = runtime.tpu or (None if machine.tpu_env_var else "local")
    source = machine.tpu_env_var or "a TPU of this machine"
    if runtime.tpu:
        source = f"runtime.tpu={runtime.tpu}"

    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        # A remote host has the address 'grpc://host:port', a TPU of this machine an empty one.
        _, _, location = resolver.master().rpartition("//")
        host, _, port = location.rpartition(":")
        if host:
            address_and_port = (host.strip("[]"), int(port))
            socket.create_connection(address_and_port, timeout=TPU_CONNECT_TIMEOUT).close()
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (OSError, ValueError, RuntimeError, ImportError, tf.errors.OpError) as error:
        advice = (
            "give the name or address of a TPU in runtime.tpu, or use another distribution_strategy"
        )
        raise _build_strategy_error("tpu", error, advice, where=f" ({source})") from error
    return tf.distribute.TPUStrategy(resolver)


def _build_strategy_error(
    policy: str, error: Exception, advice: str, where: str = ""
) -> ConfigError:
    lines = str(error).splitlines()
    reason = lines[0] if lines else type(error).__name__
    problem = f"{policy}{where} failed: {reason}"
    return ConfigError([Mistake("runtime.distribution_strategy", problem, advice)])


_BUILDERS: dict[str, Callable[[RuntimeConfig, Machine], tf.distribute.Strategy]] = {
    "off": lambda runtime, machine: tf.distribute.get_strategy(),
    "one_device": lambda runtime, machine: tf.distribute.OneDeviceStrategy(
        local_devices(runtime, machine)[0]
    ),
    "mirrored": _create_mirrored,
    "multi_worker_mirrored": _create_multi_worker_mirrored,
    "parameter_server": lambda runtime, machine: tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    ),
    "tpu": _create_tpu,
}
