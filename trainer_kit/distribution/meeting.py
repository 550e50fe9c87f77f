"""The workers of a cluster wait for each other before TensorFlow does.

TensorFlow's own wait holds Python's lock and takes SIGTERM for itself: a worker that is preempted while another one is
late would not end before it is killed. So each one listens on its own address, which TensorFlow takes over afterwards,
and calls at those of the others, until all have answered. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

from trainer_kit.distribution.cluster import Cluster

_LOG = logging.getLogger(__name__)
_PAUSE = 0.2  # seconds between two calls
_ANSWERS_WITHIN = 2.0  # seconds
_TELL_AFTER = 30.0  # seconds, and twice as long each time


def wait_for_workers(cluster: Cluster) -> None:
    """Returns when every worker of the cluster has answered at its address; any signal's handler may end it.

    Says after half a minute, and then ever more rarely, who is missing.

    Args:
      cluster: with this process in it.
    """
    addresses = {
        (job, index): address for job in ("chief", "worker") for index, address in enumerate(cluster.tasks.get(job, ()))
    }
    own = addresses.pop((cluster.task_type, cluster.task_index), "")
    begin, tell_after = time.monotonic(), _TELL_AFTER
    with _listening(own):
        while addresses:
            addresses = {who: address for who, address in addresses.items() if not _answers(address)}
            waited = time.monotonic() - begin
            if addresses and waited > tell_after:
                missing = ", ".join(f"{job} {index} ({address})" for (job, index), address in addresses.items())
                _LOG.warning("no answer for %.0f s from %s; is it started, can it be reached?", waited, missing)
                tell_after *= 2
            if addresses:
                time.sleep(_PAUSE)


@contextlib.contextmanager
def _listening(address: str) -> Iterator[None]:
    """Answers at the port of `address`; where that cannot be, TensorFlow will say why, or knows better."""
    port = address.rpartition(":")[2]
    try:
        server = socket.create_server(("", int(port)))
    except (OSError, ValueError):
        yield
        return
    with server:
        threading.Thread(target=_accept_all, args=(server,), name="meeting", daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would keep the port


def _accept_all(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN).close()
    except (OSError, ValueError):
        return False
    return True
