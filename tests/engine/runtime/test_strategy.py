"""RuntimeConfig -> strategy, on the four logical CPUs of the test process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import tensorflow as tf

from tests.fork_server import ForkServer
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import UsageError
from trainer_kit.runtime.devices import configure_devices
from trainer_kit.runtime.strategy import create_strategy, runtime_has_started

DEFAULT = type(tf.distribute.get_strategy())
GPUS = len(tf.config.list_physical_devices("GPU"))


@pytest.fixture(autouse=True)
def a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "")
    for name in ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR", "TPU_CONFIG"):
        monkeypatch.setenv(name, "")


@pytest.mark.skipif(GPUS > 0, reason="the table is that of a machine without GPUs")
@pytest.mark.parametrize(
    ("arguments", "kind", "replicas"),
    [
        ({}, DEFAULT, 1),
        ({"virtual_cpus": 1}, DEFAULT, 1),
        ({"virtual_cpus": 2}, tf.distribute.MirroredStrategy, 2),
        ({"virtual_cpus": 4}, tf.distribute.MirroredStrategy, 4),
        ({"distribution_strategy": "off"}, DEFAULT, 1),
        ({"distribution_strategy": "one_device"}, tf.distribute.OneDeviceStrategy, 1),
        ({"distribution_strategy": "mirrored"}, DEFAULT, 1),
        ({"distribution_strategy": "mirrored", "all_reduce_alg": "nccl"}, DEFAULT, 1),
        (
            {"distribution_strategy": "mirrored", "virtual_cpus": 2},
            tf.distribute.MirroredStrategy,
            2,
        ),
    ],
)
def test_each_setting_gives_its_strategy(
    arguments: dict[str, Any], kind: type, replicas: int
) -> None:
    runtime = RuntimeConfig(**arguments)

    configure_devices(runtime)
    strategy = create_strategy(runtime)

    assert type(strategy) is kind
    assert strategy.num_replicas_in_sync == replicas


@pytest.mark.parametrize("algorithm", [None, "auto", "hierarchical_copy"])
def test_each_algorithm_sums_over_replicas(algorithm: str | None) -> None:
    packs = {"num_packs": 2} if algorithm == "hierarchical_copy" else {}
    strategy = create_strategy(RuntimeConfig(virtual_cpus=4, all_reduce_alg=algorithm, **packs))
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def step() -> None:
        def add() -> None:
            context = tf.distribute.get_replica_context()
            own = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            total.assign(context.all_reduce("sum", own))

        strategy.run(add)

    step()
    copies = strategy.experimental_local_results(total)

    assert [copy.numpy() for copy in copies] == [10.0] * 4
    assert len({copy.device for copy in copies}) == 4


def test_a_single_device_is_not_mirrored_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="trainer_kit"):
        create_strategy(RuntimeConfig(distribution_strategy="mirrored", virtual_cpus=1))

    assert "nothing is mirrored, because there is one device: CPU:0" in caplog.text
    assert "distribution_strategy=mirrored: " in caplog.text


def test_a_cluster_that_is_not_used_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
    )

    assert create_strategy(RuntimeConfig(distribution_strategy="off")).num_replicas_in_sync == 1
    assert "TF_CONFIG is not used: off trains on this machine alone" in caplog.text


def test_more_cpus_than_there_are_is_a_usage_error() -> None:
    configure_devices(RuntimeConfig(virtual_cpus=2))

    assert len(tf.config.list_logical_devices("CPU")) == 4

    for ask in (create_strategy, configure_devices):
        with pytest.raises(UsageError, match=r"^runtime\.virtual_cpus: "):
            ask(RuntimeConfig(virtual_cpus=5))


def ask_before_and_after_the_start() -> None:
    """In a process whose TensorFlow has run no operation."""
    threads = tf.config.threading.get_inter_op_parallelism_threads
    before = [runtime_has_started(), runtime_has_started(), threads()]
    tf.constant(1)
    assert [*before, runtime_has_started(), threads()] == [False, False, 0, True, 0]


def test_asking_whether_the_runtime_has_started_changes_nothing() -> None:
    with ForkServer() as server:
        ended = server.run(ask_before_and_after_the_start)

    assert ended.code == 0, ended.text

    tf.constant(1)

    assert runtime_has_started()
