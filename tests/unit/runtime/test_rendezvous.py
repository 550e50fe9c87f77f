"""Workers that wait for each other, as threads of one process with an address each."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.builders import free_hosts, wait_until
from trainer_kit.errors import ExitCode, StalledError
from trainer_kit.runtime import rendezvous
from trainer_kit.runtime.rendezvous import wait_for_workers
from trainer_kit.runtime.tf_config import Cluster


def _build_clusters(count: int, chief: bool = False) -> list[Cluster]:
    hosts = free_hosts(count)
    tasks = (
        {"chief": tuple(hosts[:1]), "worker": tuple(hosts[1:])}
        if chief
        else {"worker": tuple(hosts)}
    )
    names = [(job, index) for job, addresses in tasks.items() for index in range(len(addresses))]
    return [Cluster(tasks=tasks, task_type=job, task_index=index) for job, index in names]


def _wait_in_thread(cluster: Cluster) -> threading.Thread:
    thread = threading.Thread(target=wait_for_workers, args=(cluster,), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("chief", [False, True])
def test_all_workers_continue_together_and_free_their_ports(chief: bool) -> None:
    clusters = _build_clusters(3, chief)
    threads = [_wait_in_thread(cluster) for cluster in clusters[:2]]

    time.sleep(0.5)

    assert all(thread.is_alive() for thread in threads)

    threads.append(_wait_in_thread(clusters[2]))
    servers: dict[int, socket.socket] = {}

    def take_over_free_ports() -> bool:  # as TensorFlow does
        for thread, cluster in zip(threads, clusters, strict=True):
            port = int(cluster.tasks[cluster.task_type][cluster.task_index].rpartition(":")[2])
            if not thread.is_alive() and port not in servers:
                servers[port] = socket.create_server(("127.0.0.1", port))
        return len(servers) == len(threads)

    wait_until(take_over_free_ports)
    for server in servers.values():
        server.close()


def test_who_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_FIRST_WARNING_SECONDS", 0.1)
    first, second = _build_clusters(2)
    thread = _wait_in_thread(first)

    wait_until(lambda: "not answered" in caplog.text)

    assert f"worker 1 at {second.tasks['worker'][1]} has not answered" in caplog.text
    assert "waiting" in caplog.text

    with socket.create_server(("127.0.0.1", int(second.tasks["worker"][1].rpartition(":")[2]))):
        thread.join(5)

    assert not thread.is_alive()


def test_workers_that_answer_late_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []
    barrier = threading.Barrier(16)

    def answer_together(address: str) -> bool:
        barrier.wait(10)
        addresses.append(address)
        return True

    monkeypatch.setattr(rendezvous, "_is_reachable", answer_together)
    cluster = _build_clusters(17)[0]

    wait_for_workers(cluster)

    assert sorted(addresses) == sorted(cluster.tasks["worker"][1:])


def test_an_address_of_another_machine_is_left_to_tensorflow() -> None:
    first, _ = _build_clusters(2)
    taken = socket.create_server(("127.0.0.1", int(first.tasks["worker"][0].rpartition(":")[2])))
    other = socket.create_server(("127.0.0.1", int(first.tasks["worker"][1].rpartition(":")[2])))

    with taken, other:
        thread = _wait_in_thread(first)
        thread.join(5)

    assert not thread.is_alive()


def test_a_worker_that_never_comes_ends_the_wait_by_name() -> None:
    first, second, _ = _build_clusters(3)

    with pytest.raises(
        StalledError,
        match=rf"worker 1 at {second.tasks['worker'][1]}, worker 2 .* have not answered",
    ):
        wait_for_workers(first, timeout_seconds=0.1)

    assert StalledError.exit_code == ExitCode.STALLED

    with socket.create_server(("127.0.0.1", int(first.tasks["worker"][0].rpartition(":")[2]))):
        pass  # the port is free again
