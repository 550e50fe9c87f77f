"""Strategies, beside Model Garden's; on the CPU."""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf
from official.common import distribute_utils

from trainer_kit.compat.model_garden.distribution_strategy import get_distribution_strategy
from trainer_kit.errors import ConfigError, UsageError


@pytest.mark.parametrize("name", ["OFF", "One_Device"])
def test_one_device_gives_the_same_strategy_as_theirs(name: str) -> None:
    ours = get_distribution_strategy(name)
    theirs = distribute_utils.get_distribution_strategy(name)

    assert type(ours) is type(theirs)
    if tf.distribute.get_strategy() is not ours:
        assert ours.extended.worker_devices == theirs.extended.worker_devices


@pytest.mark.parametrize("arguments", [{}, {"all_reduce_alg": "hierarchical_copy", "num_packs": 2}])
def test_mirroring_over_one_device_mirrors_nothing(arguments: dict[str, object]) -> None:
    theirs = distribute_utils.get_distribution_strategy("mirrored", **arguments)
    assert isinstance(theirs, tf.distribute.MirroredStrategy)

    ours = get_distribution_strategy("mirrored", **arguments)  # type: ignore[arg-type]
    assert ours is tf.distribute.get_strategy()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"distribution_strategy": False},
            "must be a string but got: False.*false is not one of auto, off",
        ),
        (
            {"distribution_strategy": None},
            "must be a string but got: None.*null is not one of auto, off",
        ),
        (
            {"distribution_strategy": "miror"},
            r"Unrecognized Distribution Strategy: 'miror'.*did you mean mirrored\?",
        ),
        ({"num_gpus": -1}, r"`num_gpus` can not be negative\.: runtime\.num_gpus: -1 is not"),
        (
            {"distribution_strategy": "off", "num_gpus": 2},
            "cannot be set to `off`.*off uses one device, not 2",
        ),
        (
            {"distribution_strategy": "one_device", "num_gpus": 2},
            "`OneDeviceStrategy` can not be.*uses one device",
        ),
        ({"all_reduce_alg": "ring"}, "When used with `mirrored`.*'ring' is not one of"),
        (
            {"distribution_strategy": "multi_worker_mirrored", "all_reduce_alg": "x"},
            "When used with .*'x' is not one",
        ),
    ],
)
def test_a_refused_argument_is_reported_in_model_gardens_words(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError):
        distribute_utils.get_distribution_strategy(**arguments)
    with pytest.raises(UsageError, match=message):
        get_distribution_strategy(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"distribution_strategy": "auto", "all_reduce_alg": "bogus"},
            r"^runtime\.all_reduce_alg: 'bogus' is not one",
        ),
        (
            {"distribution_strategy": "tpu", "num_gpus": 1},
            r"^runtime\.num_gpus: distribution_strategy=tpu uses no GPUs",
        ),
        ({"distribution_strategy": "Auto", "num_gpus": -1}, r"^runtime\.num_gpus: -1 is not"),
        ({"num_gpus": True}, r"^runtime\.num_gpus: true is not"),
        ({"num_gpus": "2"}, r"^runtime\.num_gpus: '2' is not"),
    ],
)
def test_an_argument_that_only_we_refuse_has_our_words(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        get_distribution_strategy(**arguments)  # type: ignore[arg-type]


def test_gpus_that_are_not_there_are_an_error_at_once() -> None:
    count = len(tf.config.list_physical_devices("GPU")) + 2
    with pytest.raises(ConfigError, match=rf"the config requests {count}, but TensorFlow sees"):
        get_distribution_strategy("mirrored", num_gpus=count)


def test_without_requested_gpus_training_uses_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("there is no GPU")
    with caplog.at_level(logging.WARNING):
        strategy = get_distribution_strategy("mirrored", num_gpus=0)

    assert "GPU(s) are left unused" in caplog.text
    assert all("CPU" in device for device in strategy.extended.worker_devices)
