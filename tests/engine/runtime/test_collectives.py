"""How many workers there are and what they agree on: in one process, and in two real ones."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
from typing import Any

import pytest

from tests.builders import free_hosts, wait_until
from tests.fork_server import ForkServer

ALONE = ("default", "mirrored", "multi_worker_mirrored")
JOBS = ("chief", "worker")
NUMBERS = ((7, 9), (-1, 5), (2**40 + 1, 0), (0, 3))  # what the chief gives, what the worker gives
TEXTS = (("of the chief", "wörker ✓"), ("1", "twelve bytes"), ("", "x"), ("", ""))


def run_alone() -> None:
    """Tells of the strategies of one process; the second has two replicas."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    strategies = (
        tf.distribute.get_strategy(),
        mirrored,
        tf.distribute.MultiWorkerMirroredStrategy(),
    )
    returned = {
        name: _call_collectives(strategy, 0)
        for name, strategy in zip(ALONE, strategies, strict=True)
    }
    tell({"warned": [_does_warn(strategy) for strategy in strategies], **returned})


def _does_warn(strategy: Any) -> bool:
    """Whether a run says that its strategy has one worker, and how a cluster is given."""
    from trainer_kit.runtime import collectives

    stream = io.StringIO()
    collectives._LOG.addHandler(logging.StreamHandler(stream))
    assert collectives.resolve_strategy(strategy) is strategy
    collectives._LOG.handlers.clear()
    return (
        "trains with one worker" in stream.getvalue()
        and "runtime.worker_hosts" in stream.getvalue()
    )


def run_together(cluster: dict[str, list[str]], index: int) -> None:
    """Tells of a strategy of two processes, as the only one of its job."""
    import tensorflow as tf

    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": JOBS[index], "index": 0}}
    )
    tell({JOBS[index]: _call_collectives(tf.distribute.MultiWorkerMirroredStrategy(), index)})


def _call_collectives(strategy: Any, index: int) -> dict[str, Any]:
    from trainer_kit.runtime import collectives

    return {
        "place": [collectives.worker_count(strategy), collectives.worker_index(strategy)],
        "numbers": [collectives.broadcast_int(strategy, numbers[index]) for numbers in NUMBERS],
        "texts": [collectives.all_gather(strategy, texts[index]) for texts in TEXTS],
    }


def tell(values: dict[str, Any]) -> None:
    """Stays when it is said: a worker that ends would break the last sum of one that is slower."""
    print(json.dumps(values), flush=True)
    signal.pause()


@pytest.fixture(scope="module")
def values_by_job() -> dict[str, Any]:
    """What the functions returned, by strategy or, of the two processes, by job."""
    cluster = {job: [address] for job, address in zip(JOBS, free_hosts(2), strict=True)}
    results: dict[str, Any] = {}
    with ForkServer() as server:
        children = [server.start(run_together, cluster, index) for index in (0, 1)]
        for child in (server.start(run_alone), *children):
            wait_until(lambda child=child: "}}\n" in child.text or not child.alive, 60)
            results |= json.loads(
                next(line for line in child.text.splitlines() if line.endswith("}}"))
            )

    return results


@pytest.mark.parametrize("strategy", ALONE)
def test_one_process_is_the_only_worker_and_agrees_with_itself(
    values_by_job: dict[str, Any], strategy: str
) -> None:
    numbers = [own for own, _ in NUMBERS]
    texts = [[own] for own, _ in TEXTS]

    assert values_by_job[strategy] == {"place": [1, 0], "numbers": numbers, "texts": texts}
    # Of one worker with a strategy for several.
    assert values_by_job["warned"] == [False, False, True]


@pytest.mark.parametrize("index", [0, 1])
def test_two_workers_have_the_chiefs_number_and_all_texts(
    values_by_job: dict[str, Any], index: int
) -> None:
    numbers = [chiefs for chiefs, _ in NUMBERS]
    texts = [list(texts) for texts in TEXTS]

    assert values_by_job[JOBS[index]] == {"place": [2, index], "numbers": numbers, "texts": texts}
