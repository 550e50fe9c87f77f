"""What RuntimeConfig knows to be impossible by itself."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"distribution_strategy": "off", "num_gpus": 2},
        "num_gpus: distribution_strategy=off uses one device, not 2",
    ),
    (
        {"distribution_strategy": "one_device", "num_gpus": 3},
        "num_gpus: distribution_strategy=one_device uses one",
    ),
    (
        {"distribution_strategy": "tpu", "num_gpus": 1},
        "num_gpus: distribution_strategy=tpu uses no GPUs",
    ),
    ({"num_gpus": -1}, "num_gpus"),
    ({"distribution_strategy": False}, "distribution_strategy"),
    ({"distribution_strategy": "horovod"}, "distribution_strategy"),
    ({"virtual_cpus": 2, "num_gpus": 1}, "virtual_cpus: cannot be combined with num_gpus"),
    (
        {"distribution_strategy": "off", "virtual_cpus": 2},
        "virtual_cpus: distribution_strategy=off does not split",
    ),
    (
        {"distribution_strategy": "tpu", "virtual_cpus": 2},
        "virtual_cpus: distribution_strategy=tpu does not split",
    ),
    (
        {"distribution_strategy": "mirrored", "tpu": "my-tpu"},
        "tpu: .* does not use the TPU 'my-tpu'",
    ),
    (
        {"distribution_strategy": "off", "worker_hosts": "a:1,b:1"},
        "worker_hosts: .*off has no workers",
    ),
    ({"worker_hosts": "a:1,b:1", "task_index": 2}, "task_index: 2 is not among the 2 worker_hosts"),
    (
        {"distribution_strategy": "mirrored", "all_reduce_alg": "ring"},
        "all_reduce_alg: 'ring' .*=mirrored; it has: auto, nccl, hierarchical_copy\n",
    ),
    (
        {"distribution_strategy": "multi_worker_mirrored", "all_reduce_alg": "hierarchical_copy"},
        "all_reduce_alg: .*=multi_worker_mirrored; it has: auto, ring, nccl\n",
    ),
    (
        {"all_reduce_alg": "gossip"},
        "'gossip' .*=auto; it has: auto, nccl, hierarchical_copy, ring\n",
    ),
    (
        {"virtual_cpus": 2, "all_reduce_alg": "nccl"},
        "all_reduce_alg: nccl needs GPUs, not virtual_cpus",
    ),
    ({"num_packs": 2}, "num_packs: needs all_reduce_alg"),
    ({"per_gpu_thread_count": 2}, "per_gpu_thread_count: needs gpu_thread_mode"),
    (
        {"per_gpu_thread_count": 2, "gpu_thread_mode": "global"},
        "per_gpu_thread_count: needs gpu_thread_mode",
    ),
    (
        {"random_seed": 2**32},
        "random_seed: 4294967296 is not a whole number of at least 0 and below 4294967296",
    ),
    (
        {"distribution_strategy": "tpu", "num_cores_per_replica": 2},
        "num_cores_per_replica: 2 is not 1",
    ),
    ({"use_tpu_mp_strategy": True}, "use_tpu_mp_strategy: true is not false"),
]

ACCEPTED: list[dict[str, Any]] = [
    {"distribution_strategy": "off", "num_gpus": 1},
    {"distribution_strategy": "one_device", "num_gpus": 1, "all_reduce_alg": "nccl"},
    {"distribution_strategy": "mirrored", "num_gpus": 8, "all_reduce_alg": "nccl", "num_packs": 2},
    {"distribution_strategy": "mirrored", "virtual_cpus": 4, "all_reduce_alg": "hierarchical_copy"},
    {"distribution_strategy": "multi_worker_mirrored", "worker_hosts": "a:1,b:1", "task_index": 1},
    {"distribution_strategy": "multi_worker_mirrored", "all_reduce_alg": "ring"},
    {"distribution_strategy": "tpu", "tpu": "my-tpu", "mixed_precision_dtype": "bfloat16"},
    {"gpu_thread_mode": "gpu_private", "per_gpu_thread_count": 2},
    {"worker_hosts": "a:1,b:1"},
    {"all_reduce_alg": "auto", "random_seed": 2**32 - 1},
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_impossible_settings_are_refused_with_their_reason(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig(**arguments)


@pytest.mark.parametrize("arguments", ACCEPTED)
def test_possible_settings_are_accepted(arguments: dict[str, Any]) -> None:
    config = RuntimeConfig(**arguments)
    assert all(getattr(config, name) == value for name, value in arguments.items())
