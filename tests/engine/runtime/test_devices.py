"""What can be set only in a process that has not used TensorFlow yet."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import free_hosts
from tests.fork_server import Child, ForkServer

FRESH_PROCESS = """
import json, os, sys
import tensorflow as tf
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.devices import configure_devices
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.runtime.strategy import create_strategy
from trainer_kit.errors import UsageError

def message(function, *arguments):
    try:
        function(*arguments)
    except UsageError as error:
        return str(error)

def attempt(function, *arguments):
    try:
        return str(function(*arguments))
    except RuntimeError as error:
        return f"RuntimeError: {error}"

found = {}
runtime = RuntimeConfig(
    virtual_cpus=2,
    gpu_thread_mode="gpu_private",
    per_gpu_thread_count=3,
    batchnorm_spatial_persistent=True,
    run_eagerly=True,
    deterministic_ops=True,
)
configure_devices(runtime)
configure_devices(runtime)
found["eager"] = [tf.config.functions_run_eagerly()]
found["threads"] = [(os.environ["TF_GPU_THREAD_MODE"], os.environ["TF_GPU_THREAD_COUNT"])]
found["batch_norm"] = os.environ["TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"]
configure_devices(RuntimeConfig(virtual_cpus=2, gpu_thread_mode="gpu_shared"))
found["eager"].append(tf.config.functions_run_eagerly())
found["threads"].append((os.environ["TF_GPU_THREAD_MODE"], os.environ["TF_GPU_THREAD_COUNT"]))
found["unseeded"] = attempt(tf.random.normal, [])
seed_everything(1)
found["seeded"] = attempt(tf.random.normal, [])

strategy = create_strategy(RuntimeConfig(virtual_cpus=2))
with strategy.scope():
    variable = tf.Variable(1.0)
found["strategy"] = type(strategy).__name__
copies = strategy.experimental_local_results(variable)
found["devices"] = sorted({copy.device[-5:] for copy in copies})
found["too_late"] = message(configure_devices, RuntimeConfig(virtual_cpus=3))
cluster = {"worker": ["localhost:1", "localhost:2"]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
found["workers_too_late"] = message(create_strategy, RuntimeConfig())
del os.environ["TF_CONFIG"]

found["tpu_here"] = message(create_strategy, RuntimeConfig(distribution_strategy="tpu"))
found["tpu_there"] = message(create_strategy, RuntimeConfig(tpu=sys.argv[1]))
os.environ["TPU_NAME"] = sys.argv[1]
found["tpu_announced"] = message(create_strategy, RuntimeConfig())
print(json.dumps(found))
"""

ARENAS = """
import ctypes, json, threading
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.devices import configure_devices

def threads_with_memory(count):
    all_there = threading.Barrier(count + 1)
    def allocate():
        kept = ctypes.create_string_buffer(4000)
        all_there.wait()  # threads that live at the same time
        all_there.wait()
        del kept
    for _ in range(count):
        threading.Thread(target=allocate).start()
    all_there.wait()
    return all_there

c = ctypes.CDLL(None)
c.fopen.restype = ctypes.c_void_p
c.malloc_info.argtypes, c.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
configure_devices(RuntimeConfig())
threads = threads_with_memory(60)
stream = c.fopen(b"arenas.xml", b"w")
c.malloc_info(0, stream)
c.fclose(stream)
threads.wait()
print(json.dumps({"arenas": open("arenas.xml").read().count("<heap nr=")}))
"""

PARAMETER_SERVER = """
import json, os, sys
import tensorflow as tf
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.strategy import create_strategy

tasks = {name: [address] for name, address in zip(("chief", "worker", "ps"), sys.argv[1:])}
worker = tf.distribute.Server(tasks, job_name="worker", task_index=0, start=True)
server = tf.distribute.Server(tasks, job_name="ps", task_index=0, start=True)
os.environ["TF_CONFIG"] = json.dumps({"cluster": tasks, "task": {"type": "chief", "index": 0}})
strategy = create_strategy(RuntimeConfig())
with strategy.scope():
    variable = tf.Variable(1.0)
found = {"strategy": type(strategy).__name__, "device": variable.device}
print(json.dumps(found), flush=True)
os._exit(0)  # servers in the process of the chief do not end by themselves
"""


def run_program(code: str, *arguments: str) -> None:
    """In a process that has not used TensorFlow, on a machine with nothing special."""
    for name in list(os.environ):
        if name.startswith(("TPU_", "TF_", "COLAB_TPU")):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    sys.argv = ["-c", *arguments]
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


def read_result(child: Child) -> dict[str, Any]:
    """What the program printed."""
    ended = child.wait(90)
    assert ended.code == 0, ended.text[-3000:]
    return json.loads(next(line for line in ended.text.splitlines() if line.startswith("{")))


@pytest.fixture(scope="module")
def fresh(server: ForkServer) -> dict[str, Any]:
    return read_result(server.start(run_program, FRESH_PROCESS, f"grpc://{free_hosts(1)[0]}"))


def test_virtual_cpus_are_real_replicas(fresh: dict[str, Any]) -> None:
    assert fresh["strategy"] == "MirroredStrategy"
    assert fresh["devices"] == ["CPU:0", "CPU:1"]


def test_more_virtual_cpus_once_tensorflow_runs_are_refused(fresh: dict[str, Any]) -> None:
    message = (
        "runtime.virtual_cpus: TensorFlow is already in use in this process, with 2 "
        "CPU device(s) instead of 3; "
    )
    assert fresh["too_late"].startswith(message)


def test_threads_and_eager_functions_are_set_and_changed_again(fresh: dict[str, Any]) -> None:
    assert fresh["eager"] == [True, False]
    assert fresh["threads"] == [["gpu_private", "3"], ["gpu_shared", "2"]]
    assert fresh["batch_norm"] == "1"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas")
@pytest.mark.skipif("MALLOC_ARENA_MAX" in os.environ, reason="the environment limits the arenas")
def test_each_thread_has_a_memory_arena_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    assert read_result(server.start(run_program, ARENAS, folder=str(tmp_path)))["arenas"] > 60


def test_deterministic_ops_refuse_random_numbers_without_a_seed(fresh: dict[str, Any]) -> None:
    assert fresh["unseeded"].startswith("RuntimeError: Random ops require a seed")
    assert fresh["seeded"].startswith("tf.Tensor")


def test_workers_after_tensorflow_was_used_are_refused(fresh: dict[str, Any]) -> None:
    told = fresh["workers_too_late"]

    assert told.startswith(
        "runtime.distribution_strategy: multi_worker_mirrored failed: Collective ops must be"
    )
    assert "make variables and tensors in build_model" in told


def test_a_tpu_that_does_not_answer_is_named_at_once(fresh: dict[str, Any]) -> None:
    assert fresh["tpu_here"].startswith(
        "runtime.distribution_strategy: tpu (a TPU of this machine) failed: TPUs not"
    )
    assert fresh["tpu_there"].startswith(
        "runtime.distribution_strategy: tpu (runtime.tpu=grpc://127.0.0.1:"
    )
    assert (
        "failed: [Errno 111] Connection refused; give the name or address of a TPU"
        in fresh["tpu_there"]
    )
    assert fresh["tpu_announced"].startswith(
        "runtime.distribution_strategy: tpu (TPU_NAME) failed: "
    )


def test_the_chief_of_parameter_servers_puts_variables_on_them(server: ForkServer) -> None:
    placement = read_result(server.start(run_program, PARAMETER_SERVER, *free_hosts(3)))

    assert placement["strategy"] == "ParameterServerStrategyV2"
    assert "/job:ps/" in placement["device"]
