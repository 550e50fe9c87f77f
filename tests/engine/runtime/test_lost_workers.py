from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.errors import PreemptedError, StorageError
from trainer_kit.runtime.lost_workers import convert_lost_worker_errors, find_lost_worker

# What TensorFlow 2.20 says, shortened: a dead worker, a dead chief, one whose connection broke, one
# that is back.
UNHEALTHY = (
    "Graph execution error:\n\nDetected at node cond/CollectiveReduceV2\nCollective ops is "
    "aborted by: Error reported "
    "from /job:worker/task:1: The following tasks are unhealthy (stopped sending "
    "heartbeats):\n/job:worker/replica:0/"
    "task:1\nThe tasks have crashed."
)
CHIEF_GONE = (
    "Collective ops is aborted by: Failed to send RPC to coordination service. Either the "
    "leader task was preempted/"
    "died/restarted unexpectedly\nAdditional GRPC error information from remote target "
    "/job:chief/replica:0/task:0 "
    "while calling /tensorflow.CoordinationService/Heartbeat:"
)
BROKEN = (
    "Collective ops is aborted by: Socket closed\nAdditional GRPC error information from "
    "remote target "
    "/job:worker/replica:0/task:2 while calling /tensorflow.WorkerService/RecvBuf:"
)
BACK = (
    "Collective ops is aborted by: Error reported from /job:worker/task:1: "
    "/job:worker/replica:0/task:1 unexpectedly "
    "tried to connect with a different incarnation. It has likely restarted."
)


def create_unavailable_error(message: str) -> tf.errors.OpError:
    return tf.errors.UnavailableError(None, None, message)


@pytest.mark.parametrize(
    ("error", "who"),
    [
        (create_unavailable_error(UNHEALTHY), "worker 1"),
        (create_unavailable_error(CHIEF_GONE), "chief 0"),
        (create_unavailable_error(BROKEN), "worker 2"),
        (tf.errors.AbortedError(None, None, BACK), "worker 1"),
        (
            create_unavailable_error("Collective ops is aborted by: cluster check alive failed"),
            "another worker",
        ),
    ],
)
def test_the_worker_that_is_gone_is_named(error: tf.errors.OpError, who: str) -> None:
    assert find_lost_worker(error) == who


@pytest.mark.parametrize(
    "error",
    [
        create_unavailable_error("the file system does not answer"),
        tf.errors.InvalidArgumentError(
            None, None, "Collective ops is aborted by: assertion failed"
        ),
        ValueError("Collective ops is aborted by: Socket closed"),
    ],
)
def test_other_errors_are_not_taken_for_a_lost_worker(error: Exception) -> None:
    assert find_lost_worker(error) is None

    with pytest.raises(type(error)) as raised, convert_lost_worker_errors():
        raise error

    assert raised.value is error


def test_a_lost_worker_is_found_behind_the_errors_that_it_led_to() -> None:
    with (
        pytest.raises(
            PreemptedError, match=r"worker 1 is gone.*the same command resumes"
        ) as raised,
        convert_lost_worker_errors(),
    ):
        try:
            raise create_unavailable_error(UNHEALTHY)
        except tf.errors.OpError as error:
            raise StorageError("ckpt-50 was not written") from error

    assert raised.value.exit_code == 75
    assert isinstance(raised.value.__cause__, StorageError)


def test_a_requested_stop_stays_a_stop_without_the_other_worker() -> None:
    stop = PreemptedError("stopped by SIGTERM at step 5")

    with pytest.raises(PreemptedError) as raised, convert_lost_worker_errors():
        try:
            raise create_unavailable_error(UNHEALTHY)
        except tf.errors.OpError as error:
            raise stop from error

    assert raised.value is stop
