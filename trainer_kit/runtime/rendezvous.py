"""The workers of a cluster wait for each other before TensorFlow does.

TensorFlow's own wait holds Python's lock and takes SIGTERM for itself: a worker that is preempted
while another one is late would not end before it is killed. So each one listens on its own address,
which TensorFlow takes over afterwards, and calls at those of the others, until all have answered.
Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from trainer_kit.errors import StalledError
from trainer_kit.runtime.tf_config import Cluster

_LOG = logging.getLogger(__name__)

# The time between two calls.
_RETRY_SECONDS = 0.2

# Seconds.
_CONNECT_TIMEOUT = 2.0

_MAX_CONCURRENT_CALLS = 64

# The time of the first warning. Each next one comes after twice the time.
_FIRST_WARNING_SECONDS = 10.0


def wait_for_workers(cluster: Cluster, timeout_seconds: float | None = None) -> None:
    """Blocks until every worker of the cluster has answered at its address.

    The handler of any signal may end the wait. After ten seconds, and then less and less often, a
    warning names the workers that have not answered.

    Args:
      cluster: The cluster of this process.
      timeout_seconds: How long to wait. None means without a limit.

    Raises:
      StalledError: when the time is over. The message names the workers that have not answered.
    """
    addresses = {
        (job, index): address
        for job in ("chief", "worker")
        for index, address in enumerate(cluster.tasks.get(job, ()))
    }
    own_address = addresses.pop((cluster.task_type, cluster.task_index), "")
    start = time.monotonic()
    next_warning = _FIRST_WARNING_SECONDS

    # All workers are called at once: one that does not even refuse takes the whole time for an
    # answer.
    with _listen(own_address), ThreadPoolExecutor(_MAX_CONCURRENT_CALLS, "rendezvous") as calls:
        while addresses:
            reachable = calls.map(_is_reachable, addresses.values())
            answers = dict(zip(addresses, reachable, strict=True))
            addresses = {task: address for task, address in addresses.items() if not answers[task]}
            waited = time.monotonic() - start
            missing = ", ".join(
                f"{job} {index} at {address}" for (job, index), address in addresses.items()
            )
            have = "has" if len(addresses) == 1 else "have"

            if addresses and timeout_seconds is not None and waited > timeout_seconds:
                raise StalledError(
                    f"{missing} {have} not answered within {timeout_seconds:g} s"
                    " (trainer.hang_timeout_seconds); start all workers, and make sure that each"
                    " can reach the others at these addresses"
                )

            if addresses and waited > next_warning:
                prospect = "" if timeout_seconds is None else f", for {timeout_seconds:g} s at most"
                _LOG.warning(
                    "%s %s not answered for %.0f s; still waiting%s (was it started, and can it be"
                    " reached?)",
                    *(missing, have, waited, prospect),
                )
                next_warning *= 2

            if addresses:
                time.sleep(_RETRY_SECONDS)


@contextlib.contextmanager
def _listen(address: str) -> Iterator[None]:
    """Answers at the port of `address`.

    If the port cannot be opened, TensorFlow reports why later.
    """
    port = address.rpartition(":")[2]
    try:
        server = socket.create_server(("", int(port)))
    except (OSError, ValueError):
        yield
        return

    def accept_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    with server:
        threading.Thread(target=accept_all, name="rendezvous", daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                # Wakes the thread, which would keep the port.
                server.shutdown(socket.SHUT_RDWR)


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT)
        connection.close()
    except (OSError, ValueError):
        return False
    return True
