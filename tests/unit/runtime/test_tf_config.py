"""TF_CONFIG, made of worker_hosts or found in the environment."""

from __future__ import annotations

import json
import os

import pytest

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.runtime.tf_config import (
    configure_cluster,
    find_parameter_server_mistakes,
    read_cluster,
)


@pytest.fixture(autouse=True)
def no_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "")  # also puts back what a test writes


def test_no_worker_hosts_mean_one_worker_and_no_tf_config() -> None:
    assert configure_cluster(None, -1) == 1
    assert configure_cluster("", 0) == 1

    os.environ["TF_CONFIG"] = " "
    assert read_cluster() is None
    assert "TF_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("hosts", "index", "workers", "task"),
    [
        (
            "10.0.0.1:2222, 10.0.0.2:2222,[::1]:80",
            2,
            ["10.0.0.1:2222", "10.0.0.2:2222", "[::1]:80"],
            2,
        ),
        ("localhost:2222", -1, ["localhost:2222"], 0),  # a single worker needs no index
    ],
)
def test_worker_hosts_become_tf_config(
    hosts: str, index: int, workers: list[str], task: int
) -> None:
    for _ in range(2):  # the second time nothing changes
        assert configure_cluster(hosts, index) == len(workers)
        assert json.loads(os.environ["TF_CONFIG"]) == {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": task},
        }


def test_an_existing_tf_config_wins_over_worker_hosts(caplog: pytest.LogCaptureFixture) -> None:
    cluster = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"], "evaluator": ["e:1"]}
    os.environ["TF_CONFIG"] = text = json.dumps(
        {"cluster": cluster, "task": {"type": "chief", "index": "0"}}
    )

    assert configure_cluster("x:1,y:1", 5) == 3
    assert os.environ["TF_CONFIG"] == text
    assert "worker_hosts is not used: TF_CONFIG is set, with 3 worker(s)" in caplog.text

    tf_config = read_cluster()
    assert tf_config is not None
    assert tf_config.worker_count == 3
    assert tf_config.parameter_server_count == 1
    assert tf_config.task_type == "chief"
    assert tf_config.task_index == 0
    assert tf_config.is_training_task


def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    os.environ["TF_CONFIG"] = (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}'
    )
    cluster = read_cluster()

    assert cluster is not None
    assert not cluster.is_training_task


@pytest.mark.parametrize(
    "text", ["{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}']
)
def test_a_tf_config_without_cluster_is_none(text: str) -> None:
    os.environ["TF_CONFIG"] = text
    assert configure_cluster("a:1,b:1", 0) == 2


@pytest.mark.parametrize(
    ("hosts", "index", "message"),
    [
        (
            "a:1,b:1",
            -1,
            (
                r"runtime\.task_index: -1 is not one of 2 worker\(s\); each needs its own "
                r"index, 0 to 1"
            ),
        ),
        ("a:1,b:1", 2, r"runtime\.task_index: 2 is not one of 2 worker\(s\)"),
        ("a:1", 1, r"runtime\.task_index: 1 is not one of 1 worker\(s\)"),
        ("a:1,b", 0, "runtime.worker_hosts: 'b' is not host:port"),
        ("a:1,,b:1", 0, "runtime.worker_hosts: '' is not host:port"),
        ("a:1,b:70000", 0, "'b:70000' is not host:port"),
        ("a:1,:5", 0, "':5' is not host:port"),
        ("a:1,a:1", 0, "runtime.worker_hosts: 'a:1' is listed twice"),
    ],
)
def test_wrong_hosts_and_indices_are_explained(hosts: str, index: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        configure_cluster(hosts, index)

    assert caught.value.exit_code == ExitCode.USAGE
    assert "TF_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "TF_CONFIG: it is not JSON"),
        ("[1]", "TF_CONFIG: it is a list, not a JSON object"),
        ('{"cluster": ["a:1"]}', "TF_CONFIG: 'cluster' is .* not lists of addresses by task type"),
        ('{"cluster": {"worker": "a:1"}}', "not lists of addresses"),
        ('{"cluster": {"worker": ["a:1", "b"]}}', "TF_CONFIG: the address 'b' has no port"),
        (
            '{"cluster": {"chief": ["a"], "worker": ["b:1"]}}',
            "TF_CONFIG: the address 'a' has no port",
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": 3}',
            "TF_CONFIG: 'task' is 3, without the type and index",
        ),
        (
            '{"cluster": {"worker": ["a:1"]}}',
            "TF_CONFIG: 'task' is None, without the type and index",
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}',
            "without the type and index",
        ),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
            "this process is worker 2, but the cluster has worker 0 to 1",
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "boss", "index": 0}}',
            "this process is boss 0",
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "x"}}',
            "index is 'x', not a whole number",
        ),
    ],
)
def test_a_broken_tf_config_is_explained(text: str, message: str) -> None:
    os.environ["TF_CONFIG"] = text
    with pytest.raises(UsageError, match=message):
        configure_cluster(None, -1)


@pytest.mark.parametrize(
    ("runtime", "servers", "refused"),
    [
        ({"distribution_strategy": "parameter_server"}, False, True),
        ({}, True, True),
        ({}, False, False),
        ({"distribution_strategy": "off"}, True, False),
        ({"virtual_cpus": 1}, True, True),
        ({"virtual_cpus": 2}, True, False),
    ],
)
def test_runs_refuse_parameter_servers(
    runtime: dict[str, object], servers: bool, refused: bool
) -> None:
    cluster = {"chief": ["c:1"], "worker": ["a:1"], **({"ps": ["p:1"]} if servers else {})}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    )
    mistakes = [
        str(mistake) for mistake in find_parameter_server_mistakes(RuntimeConfig(**runtime))
    ]  # type: ignore[arg-type]

    assert len(mistakes) == refused
    assert all(
        "runs do not support parameter servers; use multi_worker_mirrored" in text
        for text in mistakes
    )
