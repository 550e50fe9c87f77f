"""Which strategy `auto` comes to, and what a machine cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import UsageError
from trainer_kit.runtime.strategy_choice import Machine, choose_strategy, local_devices
from trainer_kit.runtime.tf_config import Cluster

CPU = Machine()
GPU = Machine(gpus=1)
GPUS = Machine(gpus=4)
TPU = Machine(tpu_env_var="TPU_NAME")
WORKERS = Cluster(tasks={"worker": ("a:1", "b:1")})
CHIEF = Cluster(tasks={"chief": ("c:1",), "worker": ("a:1",), "ps": ("p:1",)}, task_type="chief")
PS = Cluster(tasks=CHIEF.tasks, task_type="ps")
EVALUATOR = Cluster(tasks=WORKERS.tasks, task_type="evaluator")


@pytest.mark.parametrize(
    ("arguments", "machine", "policy"),
    [
        ({}, CPU, "off"),
        ({}, GPU, "off"),
        ({}, GPUS, "mirrored"),
        ({"num_gpus": 1}, GPUS, "off"),
        ({"num_gpus": 2}, GPUS, "mirrored"),
        ({"virtual_cpus": 2}, CPU, "mirrored"),
        ({"virtual_cpus": 2}, GPUS, "mirrored"),
        ({"virtual_cpus": 2}, TPU, "mirrored"),
        ({}, TPU, "tpu"),
        ({"num_gpus": 1}, Machine(gpus=1, tpu_env_var="TPU_NAME"), "off"),
        ({"tpu": "grpc://10.0.0.1:8470"}, GPUS, "tpu"),
        ({}, Machine(cluster=WORKERS, gpus=4), "multi_worker_mirrored"),
        ({}, Machine(cluster=WORKERS, tpu_env_var="TPU_NAME"), "tpu"),
        ({}, Machine(cluster=Cluster(tasks={"worker": ("a:1",)})), "off"),
        ({}, Machine(cluster=CHIEF), "parameter_server"),
        ({}, Machine(cluster=EVALUATOR), "off"),
        ({}, Machine(cluster=EVALUATOR, gpus=4), "mirrored"),
        ({"distribution_strategy": "off"}, GPUS, "off"),
        ({"distribution_strategy": "mirrored"}, Machine(cluster=WORKERS), "mirrored"),
        (
            {"distribution_strategy": "multi_worker_mirrored"},
            Machine(cluster=WORKERS),
            "multi_worker_mirrored",
        ),
        ({"all_reduce_alg": "ring"}, Machine(cluster=WORKERS), "multi_worker_mirrored"),
        ({"all_reduce_alg": "nccl"}, CPU, "off"),
    ],
)
def test_the_strategy_follows_from_config_and_machine(
    arguments: dict[str, Any], machine: Machine, policy: str
) -> None:
    assert choose_strategy(RuntimeConfig(**arguments), machine) == policy


@pytest.mark.parametrize(
    ("arguments", "machine", "message"),
    [
        (
            {"num_gpus": 8},
            GPUS,
            "runtime.num_gpus: the config requests 8, but TensorFlow sees 4 GPUs",
        ),
        (
            {"num_gpus": 2, "distribution_strategy": "mirrored"},
            GPU,
            "the config requests 2, but TensorFlow sees 1 GPU on",
        ),
        (
            {"num_gpus": 1, "distribution_strategy": "one_device"},
            CPU,
            "the config requests 1, but TensorFlow sees no GPU on",
        ),
        (
            {"num_gpus": 2},
            Machine(gpus=4, cluster=WORKERS),
            "uses all 4 GPUs of a machine, not 2; hide the others",
        ),
        (
            {"virtual_cpus": 2},
            Machine(cluster=WORKERS),
            "runtime.virtual_cpus: 2 devices of one machine cannot",
        ),
        (
            {"distribution_strategy": "multi_worker_mirrored"},
            CPU,
            "multi_worker_mirrored needs the addresses of the workers; set runtime.worker_hosts",
        ),
        ({"distribution_strategy": "parameter_server"}, CPU, "parameter_server needs a cluster"),
        (
            {"distribution_strategy": "parameter_server"},
            Machine(cluster=WORKERS),
            "parameter_server needs a cluster",
        ),
        (
            {"distribution_strategy": "parameter_server"},
            Machine(cluster=PS),
            "directed by the chief, .* is ps 0",
        ),
        (
            {"all_reduce_alg": "ring"},
            GPUS,
            "'ring' is not an algorithm of mirrored, which auto chose; it has: auto, n",
        ),
        (
            {"all_reduce_alg": "hierarchical_copy"},
            Machine(cluster=WORKERS),
            "which auto chose; it has: auto, ring, n",
        ),
        (
            {"all_reduce_alg": "nccl"},
            Machine(cluster=WORKERS),
            "nccl needs GPUs, and this machine has none",
        ),
    ],
)
def test_what_the_machine_has_not_is_a_usage_error(
    arguments: dict[str, Any], machine: Machine, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_strategy(RuntimeConfig(**arguments), machine)


@pytest.mark.parametrize(
    ("arguments", "machine", "devices"),
    [
        ({}, CPU, ("CPU:0",)),
        ({"virtual_cpus": 2}, CPU, ("CPU:0", "CPU:1")),
        ({"virtual_cpus": 2}, GPUS, ("CPU:0", "CPU:1")),
        ({"virtual_cpus": 1}, GPUS, ("CPU:0",)),
        ({}, GPUS, ("GPU:0", "GPU:1", "GPU:2", "GPU:3")),
        ({"num_gpus": 2}, GPUS, ("GPU:0", "GPU:1")),
    ],
)
def test_virtual_cpus_come_before_gpus_and_gpus_before_the_cpu(
    arguments: dict[str, Any], machine: Machine, devices: tuple[str, ...]
) -> None:
    assert local_devices(RuntimeConfig(**arguments), machine) == devices
