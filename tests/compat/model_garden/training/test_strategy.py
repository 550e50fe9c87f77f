"""Strategies, beside Model Garden's; on the CPU."""

from __future__ import annotations

import json
import logging
import os

import pytest
import tensorflow as tf
from official.common import distribute_utils

from trainer_kit.compat.model_garden.training.strategy import (
    configure_cluster,
    get_distribution_strategy,
    get_strategy_scope,
)
from trainer_kit.errors import ConfigError


@pytest.mark.parametrize("name", ["off", "OFF", "one_device", "One_Device"])
def test_one_device_gives_the_same_strategy_as_theirs(name: str) -> None:
    ours, theirs = get_distribution_strategy(name), distribute_utils.get_distribution_strategy(name)
    assert type(ours) is type(theirs)
    if tf.distribute.get_strategy() is not ours:
        assert ours.extended.worker_devices == theirs.extended.worker_devices


@pytest.mark.parametrize("arguments", [{}, {"all_reduce_alg": "hierarchical_copy", "num_packs": 2}, {"num_packs": 3}])
def test_mirroring_over_one_device_mirrors_nothing(arguments: dict[str, object]) -> None:
    theirs = distribute_utils.get_distribution_strategy("mirrored", **arguments)
    assert isinstance(theirs, tf.distribute.MirroredStrategy)
    assert get_distribution_strategy("mirrored", **arguments) is tf.distribute.get_strategy()  # type: ignore[arg-type]


def test_the_default_is_mirrored_and_further_arguments_are_left_alone() -> None:
    assert get_distribution_strategy(tpu_worker="x", tpu_address="unused") is tf.distribute.get_strategy()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"distribution_strategy": False}, r"False is not the name of a strategy; YAML reads off as false: .* 'off'"),
        ({"distribution_strategy": None}, "None is not the name of a strategy; give one of: auto, off"),
        ({"distribution_strategy": "miror"}, r"'miror' is not the name of a strategy; did you mean mirrored\?"),
        ({"num_gpus": -1}, r"runtime\.num_gpus: -1 is not allowed"),
        ({"distribution_strategy": "off", "num_gpus": 2}, "distribution_strategy=off uses one device"),
        ({"distribution_strategy": "one_device", "num_gpus": 2}, "distribution_strategy=one_device uses one device"),
        ({"all_reduce_alg": "ring"}, "'ring' is not an algorithm of distribution_strategy=mirrored"),
        ({"distribution_strategy": "multi_worker_mirrored", "all_reduce_alg": "x"}, "'x' is not an algorithm"),
    ],
)
def test_where_theirs_is_a_value_error_ours_names_setting_and_remedy(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError):
        distribute_utils.get_distribution_strategy(**arguments)
    with pytest.raises(ConfigError, match=told):
        get_distribution_strategy(**arguments)  # type: ignore[arg-type]


def test_gpus_that_are_not_there_are_an_error_at_once() -> None:
    there = len(tf.config.list_physical_devices("GPU"))
    with pytest.raises(ConfigError, match=rf"{there + 2} asked for, but TensorFlow sees"):
        get_distribution_strategy("mirrored", num_gpus=there + 2)


def test_a_machine_with_gpus_trains_on_the_cpu_when_none_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("there is no GPU")
    with caplog.at_level(logging.WARNING):
        strategy = get_distribution_strategy("mirrored", num_gpus=0)
    assert "GPU(s) are left unused" in caplog.text
    assert all("CPU" in device for device in strategy.extended.worker_devices)


@pytest.mark.parametrize(
    ("environment", "hosts", "index"),
    [
        (None, None, -1),
        (None, "a:1", -1),
        (None, "a:1,b:2", 1),
        ({"cluster": {"chief": ["c:1"], "worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}, None, -1),
    ],
)
def test_the_cluster_is_configured_as_theirs(
    monkeypatch: pytest.MonkeyPatch, environment: object, hosts: str | None, index: int
) -> None:
    found = []
    for configure in (configure_cluster, distribute_utils.configure_cluster):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if environment is not None:
            monkeypatch.setenv("TF_CONFIG", json.dumps(environment))
        found.append((configure(hosts, index), json.loads(os.environ.get("TF_CONFIG", "{}"))))
    assert found[0] == found[1]


def test_several_workers_need_an_index_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for configure in (configure_cluster, distribute_utils.configure_cluster):
        with pytest.raises(ValueError, match="task_index"):
            configure("a:1,b:2")


def test_the_scope_is_the_strategys_or_nothing() -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with get_strategy_scope(strategy):
        assert tf.distribute.get_strategy() is strategy
    for scope in (get_strategy_scope(None), distribute_utils.get_strategy_scope(None)):
        with scope:
            assert not tf.distribute.has_strategy()
