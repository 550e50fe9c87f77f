"""Chooses the strategy that fits the config and the machine; pure, and without TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_kit.config.schema.runtime import ALL_REDUCE_ALGORITHMS, RuntimeConfig
from trainer_kit.errors import ConfigError, Mistake
from trainer_kit.runtime.tf_config import Cluster

# Environment variables in which a platform announces its TPU.
TPU_ENV_VARS = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR", "TPU_CONFIG")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices and workers to train on.

    Attributes:
      gpus: The number of GPUs of this machine.
      tpu_env_var: The first of TPU_ENV_VARS that is set. Empty: none.
      cluster: The other workers, of TF_CONFIG.
    """

    gpus: int = 0
    tpu_env_var: str = ""
    cluster: Cluster | None = None


def choose_strategy(runtime: RuntimeConfig, machine: Machine) -> str:
    """Returns the name of the strategy to use: that of the config, or the choice of `auto`.

    What the config asks for comes before what the environment offers: runtime.tpu and
    runtime.virtual_cpus first, then a TPU, then other workers, then several GPUs, else `off`.

    Raises:
      ConfigError: when the machine lacks what the config asks for.
    """
    policy: str = runtime.distribution_strategy
    if policy == "auto":
        policy = _choose_automatically(runtime, machine)

    _check_gpus(policy, runtime, machine)
    _check_cluster(policy, runtime, machine.cluster)
    _check_all_reduce(policy, runtime, machine)
    return policy


def local_devices(runtime: RuntimeConfig, machine: Machine) -> tuple[str, ...]:
    """Returns the devices of this machine that `mirrored` uses.

    They are virtual CPUs if the config asks for these, else GPUs, else the CPU.
    """
    if runtime.virtual_cpus or not machine.gpus:
        cpu_count = runtime.virtual_cpus or 1
        return tuple(f"CPU:{index}" for index in range(cpu_count))
    gpu_count = runtime.num_gpus or machine.gpus
    return tuple(f"GPU:{index}" for index in range(gpu_count))


def _choose_automatically(runtime: RuntimeConfig, machine: Machine) -> str:
    cluster = machine.cluster
    if runtime.tpu:
        return "tpu"
    if runtime.virtual_cpus > 1:
        return "mirrored"
    if machine.tpu_env_var and not runtime.num_gpus:
        return "tpu"
    if cluster is not None and cluster.is_training_task:
        if cluster.parameter_server_count:
            return "parameter_server"
        if cluster.is_multi_worker:
            return "multi_worker_mirrored"
    if runtime.virtual_cpus or len(local_devices(runtime, machine)) > 1:
        return "mirrored"
    return "off"


def _check_gpus(policy: str, runtime: RuntimeConfig, machine: Machine) -> None:
    if runtime.num_gpus > machine.gpus and policy != "parameter_server":
        gpus = {0: "no GPU", 1: "1 GPU"}.get(machine.gpus, f"{machine.gpus} GPUs")
        raise _build_config_error(
            "num_gpus",
            f"the config requests {runtime.num_gpus}, but TensorFlow sees {gpus} on this machine",
            "set it to 0 to use what there is, or check the driver and CUDA_VISIBLE_DEVICES",
        )
    if policy == "multi_worker_mirrored" and 0 < runtime.num_gpus < machine.gpus:
        raise _build_config_error(
            "num_gpus",
            f"multi_worker_mirrored uses all {machine.gpus} GPUs of a machine, not"
            f" {runtime.num_gpus}",
            "hide the others with CUDA_VISIBLE_DEVICES, or set num_gpus to 0",
        )


def _check_cluster(policy: str, runtime: RuntimeConfig, cluster: Cluster | None) -> None:
    if runtime.virtual_cpus > 1 and cluster is not None and cluster.is_multi_worker:
        raise _build_config_error(
            "virtual_cpus",
            f"{runtime.virtual_cpus} devices of one machine cannot train together with other"
            " workers",
            "set it to 0, or unset TF_CONFIG and runtime.worker_hosts",
        )
    if policy == "multi_worker_mirrored" and (cluster is None or not cluster.worker_count):
        raise _build_config_error(
            "distribution_strategy",
            "multi_worker_mirrored needs the addresses of the workers",
            "set runtime.worker_hosts (host:port of each, separated by commas) and"
            " runtime.task_index, or TF_CONFIG",
        )
    if policy != "parameter_server":
        return
    if cluster is None or not cluster.parameter_server_count or not cluster.worker_count:
        raise _build_config_error(
            "distribution_strategy",
            "parameter_server needs a cluster",
            "set TF_CONFIG, with a chief, workers and ps tasks",
        )
    if cluster.task_type != "chief":
        raise _build_config_error(
            "distribution_strategy",
            "parameter_server is directed by the chief, but TF_CONFIG says that this process is"
            f" {cluster.task_type} {cluster.task_index}",
            "run the experiment on the chief, and a tf.distribute.Server on each worker and ps",
        )


def _check_all_reduce(policy: str, runtime: RuntimeConfig, machine: Machine) -> None:
    """A strategy that sums nothing over devices takes any algorithm."""
    algorithm = runtime.all_reduce_alg
    algorithms = ALL_REDUCE_ALGORITHMS.get(policy)
    if algorithms is None or algorithm in (None, "auto"):
        return

    if algorithm not in algorithms:
        choice = "" if runtime.distribution_strategy == policy else ", which auto chose"
        raise _build_config_error(
            "all_reduce_alg",
            f"{algorithm!r} is not an algorithm of {policy}{choice}",
            f"it has: auto, {', '.join(algorithms)}",
        )
    if policy == "multi_worker_mirrored" and algorithm == "nccl" and not machine.gpus:
        raise _build_config_error(
            "all_reduce_alg", "nccl needs GPUs, and this machine has none", "use ring or auto"
        )


def _build_config_error(field: str, problem: str, advice: str) -> ConfigError:
    return ConfigError([Mistake(f"runtime.{field}", problem, advice)])
