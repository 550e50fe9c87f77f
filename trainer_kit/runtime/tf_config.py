"""Reads and writes TF_CONFIG, which names the workers of a cluster. Imports no TensorFlow.

TF_CONFIG is TensorFlow's own description of a cluster, in the environment as JSON: the addresses of
all tasks by type (chief, worker, ps, evaluator), and which of them this process is.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, Mistake

NO_PARAMETER_SERVERS = (
    "runs do not support parameter servers; use multi_worker_mirrored, with a cluster without ps"
    " tasks (a Trainer that your own program drives may have a ParameterServerStrategy)"
)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster that TF_CONFIG describes.

    Attributes:
      tasks: The addresses of all tasks, by type.
      task_type: The type of this process's task.
      task_index: The index of this process among the tasks of its type.
    """

    tasks: dict[str, tuple[str, ...]]
    task_type: str = "worker"
    task_index: int = 0

    @property
    def worker_count(self) -> int:
        """How many tasks train: the chief and the workers."""
        chiefs = self.tasks.get("chief", ())
        workers = self.tasks.get("worker", ())
        return len(chiefs) + len(workers)

    @property
    def worker_index(self) -> int:
        """The index of this process among the tasks that train; chiefs come first.

        0 for a process that works alone.
        """
        if not self.is_multi_worker:
            return 0
        if self.task_type == "worker":
            return self.task_index + len(self.tasks.get("chief", ()))
        return self.task_index

    @property
    def parameter_server_count(self) -> int:
        """How many tasks store variables for the others."""
        return len(self.tasks.get("ps", ()))

    @property
    def is_training_task(self) -> bool:
        """Whether this process is one of those that train together; an evaluator works alone."""
        return self.task_type != "evaluator"

    @property
    def is_multi_worker(self) -> bool:
        """Whether this process is one of several that train together."""
        return self.is_training_task and self.worker_count > 1


def configure_cluster(worker_hosts: str | None, task_index: int) -> int:
    """Sets TF_CONFIG from `worker_hosts`, unless it is set already.

    Called before TensorFlow's devices are used.

    Args:
      worker_hosts: host:port of each worker, separated by commas. None or empty: there is no
        cluster.
      task_index: The index of this process among the workers; may be -1 if there is only one.

    Returns:
      The number of workers; 1 without a cluster.

    Raises:
      ConfigError: when an address, the index or the TF_CONFIG that is already there is wrong.
    """
    existing = read_cluster()
    if existing is not None:
        if worker_hosts and existing.tasks.get("worker") != _parse_worker_hosts(worker_hosts):
            _LOG.warning(
                "runtime.worker_hosts is not used: TF_CONFIG is set, with %d worker(s)",
                existing.worker_count,
            )
        return max(existing.worker_count, 1)
    if not worker_hosts:
        return 1

    workers = _parse_worker_hosts(worker_hosts)
    # A single worker needs no index.
    index = task_index
    if len(workers) == 1 and task_index < 0:
        index = 0
    if not 0 <= index < len(workers):
        raise _build_config_error(
            "runtime.task_index",
            f"{task_index} is not one of {len(workers)} worker(s)",
            f"each needs its own index, 0 to {len(workers) - 1}, in the order of"
            " runtime.worker_hosts",
        )
    cluster = {
        "cluster": {"worker": list(workers)},
        "task": {"type": "worker", "index": index},
    }
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    return len(workers)


def read_worker_index(worker_hosts: str | None, task_index: int) -> int:
    """Returns the index of this process among the workers.

    Works before `configure_cluster` is called, too.

    Raises:
      ConfigError: when TF_CONFIG is wrong.
    """
    cluster = read_cluster()
    if cluster is not None:
        return cluster.worker_index
    if worker_hosts:
        return max(task_index, 0)
    return 0


def find_parameter_server_mistakes(runtime: RuntimeConfig) -> list[Mistake]:
    """Returns why a run cannot have parameter servers; [] when it asks for none.

    Raises:
      ConfigError: when TF_CONFIG is wrong.
    """
    strategy = runtime.distribution_strategy
    asks_cluster = strategy == "auto" and not runtime.tpu and runtime.virtual_cpus <= 1
    cluster = read_cluster() if asks_cluster else None
    if strategy != "parameter_server" and not (
        cluster and cluster.is_training_task and cluster.parameter_server_count
    ):
        return []
    origin = "" if cluster is None else "TF_CONFIG has ps tasks"
    return [Mistake("runtime.distribution_strategy", NO_PARAMETER_SERVERS, origin=origin)]


def read_cluster() -> Cluster | None:
    """Returns the cluster in TF_CONFIG, or None when there is none.

    Raises:
      ConfigError: when it is not JSON, or not the description of a cluster with this process in it.
    """
    text = os.environ.get("TF_CONFIG", "")
    if not text.strip():
        # An empty TF_CONFIG breaks TensorFlow's strategies.
        os.environ.pop("TF_CONFIG", None)
        return None

    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _build_tf_config_error(f"it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise _build_tf_config_error(f"it is a {type(content).__name__}, not a JSON object")
    if not content.get("cluster"):
        return None

    lists = content["cluster"]
    are_lists = isinstance(lists, dict)
    if are_lists:
        are_lists = all(isinstance(addresses, list) for addresses in lists.values())
    if not are_lists:
        raise _build_tf_config_error(f"'cluster' is {lists!r}, not lists of addresses by task type")
    tasks: dict[str, tuple[str, ...]] = {}
    for name, addresses in lists.items():
        tasks[name] = tuple(str(address) for address in addresses)
    for address in (*tasks.get("chief", ()), *tasks.get("worker", ())):
        if not address.rpartition(":")[2].isdecimal():
            raise _build_tf_config_error(f"the address {address!r} has no port")

    task = content.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= set(task):
        raise _build_tf_config_error(
            f"'task' is {task!r}, without the type and index of this process"
        )
    try:
        # Some platforms write the index as text.
        index = int(task["index"])
    except (TypeError, ValueError) as error:
        raise _build_tf_config_error(
            f"the task's index is {task['index']!r}, not a whole number"
        ) from error

    cluster = Cluster(tasks=tasks, task_type=str(task["type"]), task_index=index)
    task_addresses = tasks.get(cluster.task_type, ())
    if cluster.is_training_task and not 0 <= cluster.task_index < len(task_addresses):
        ranges = ", ".join(
            f"{name} 0 to {len(addresses) - 1}" for name, addresses in tasks.items() if addresses
        )
        raise _build_tf_config_error(
            f"this process is {cluster.task_type} {cluster.task_index},"
            f" but the cluster has {ranges}"
        )
    return cluster


def _parse_worker_hosts(worker_hosts: str) -> tuple[str, ...]:
    addresses = tuple(address.strip() for address in worker_hosts.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 65536
        if not host or not is_port:
            raise _build_config_error(
                "runtime.worker_hosts",
                f"{address!r} is not host:port",
                "write them like 'a:2222,b:2222'",
            )
        if addresses.count(address) > 1:
            raise _build_config_error(
                "runtime.worker_hosts",
                f"{address!r} is listed twice",
                "each worker needs its own address",
            )
    return addresses


def _build_tf_config_error(problem: str) -> ConfigError:
    example = (
        '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
    )
    return _build_config_error("TF_CONFIG", problem, f"unset it, or write it like {example}")


def _build_config_error(path: str, problem: str, advice: str) -> ConfigError:
    return ConfigError([Mistake(path, problem, advice)])
