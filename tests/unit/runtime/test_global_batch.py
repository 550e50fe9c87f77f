"""Batches over replicas."""

from __future__ import annotations

import pytest

from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.runtime.global_batch import explain_uneven_batch, split_global_batch


@pytest.mark.parametrize(
    ("batch", "replicas", "share"), [(8, 4, 2), (7, 1, 7), (4, 4, 1), (1, 1, 1)]
)
def test_each_replica_gets_an_equal_share(batch: int, replicas: int, share: int) -> None:
    assert split_global_batch(batch, replicas, "task.train_data.global_batch_size") == share


@pytest.mark.parametrize(
    ("batch", "replicas", "message"),
    [
        (
            10,
            4,
            "task.train_data.global_batch_size: batch 10 on 4 replicas leaves 2 over; "
            "the nearest that can be shared equally: 8 or 12",
        ),
        (
            3,
            4,
            (
                "task.train_data.global_batch_size: batch 3 on 4 replicas leaves 3 over; the "
                "nearest .* equally: 4$"
            ),
        ),
        (0, 4, "a batch of 0 examples is empty; use 4 or a multiple of it"),
        (0, 1, "a batch of 0 examples is empty; use 1 or more"),
    ],
)
def test_what_cannot_be_shared_names_the_nearest_that_can(
    batch: int, replicas: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        split_global_batch(batch, replicas, "task.train_data.global_batch_size")

    assert caught.value.exit_code == ExitCode.USAGE


def test_only_uneven_batches_become_config_errors() -> None:
    refused = "The `global_batch_size` 7 is not divisible by `num_replicas_in_sync` 2"

    with (
        pytest.raises(UsageError, match=r"task\.x: batch 7 on 2 replicas leaves 1 over"),
        explain_uneven_batch(7, 2, "task.x"),
    ):
        raise ValueError(refused)

    for batch, message in ((8, refused), (7, "another")):
        with pytest.raises(ValueError, match=message), explain_uneven_batch(batch, 2, "task.x"):
            raise ValueError(message)
