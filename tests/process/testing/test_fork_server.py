"""Children of the fork server behave as new processes that begin with TensorFlow imported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.builders import wait_until
from tests.fork_server import ForkServer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One server for all tests."""
    with ForkServer() as server:
        yield server


def split_the_cpu() -> None:
    """Possible only where TensorFlow was not used before."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print(os.getpid() == os.getsid(0), os.getcwd(), len(tf.config.list_logical_devices("CPU")))
    raise ValueError("what went wrong")


def know(module: str) -> None:
    """Tells which process is the server, and by the exit code whether a module is imported."""
    print(os.getppid())
    raise SystemExit(0 if module in sys.modules else 3)


def wait_for_a_signal() -> None:
    """Says when it is there, and stays."""
    print("here", flush=True)
    signal.pause()


def test_each_child_is_a_session_with_an_unused_tensorflow(
    server: ForkServer, tmp_path: Path
) -> None:
    for _ in range(2):
        end = server.run(split_the_cpu, folder=str(tmp_path))
        assert end.code == 1
        assert f"True {tmp_path} 2\n" in end.text
        assert "ValueError: what went wrong" in end.text


def test_a_child_can_be_killed_and_waited_for(server: ForkServer) -> None:
    child = server.start(wait_for_a_signal)
    wait_until(lambda: child.text)
    with pytest.raises(TimeoutError, match="here"):
        child.wait(0.01)
    child.kill(signal.SIGTERM)
    end = child.wait(30)

    assert end.code == -signal.SIGTERM
    assert end.text == "here\n"
    assert not child.alive
    child.kill()  # of a process that is gone: nothing


def test_a_run_that_takes_too_long_is_killed(server: ForkServer) -> None:
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.2 s"):
        server.run(wait_for_a_signal, timeout=0.2)


def replace_servers() -> None:
    """In a process of its own, whose servers import little: what replaces them is the same, and
    takes no seconds.
    """
    fork_server._PRELOADED = "colorsys"
    # Modules that nothing else imports.
    servers = []
    for needs, code in (((), 3), (["poplib"], 0), ((), 0), (["imaplib"], 0)):
        with ForkServer(needs=needs) as server:
            end = server.run(know, "poplib")
        assert end.code == code, end.text
        servers.append(int(end.text))

    first, second, same, last = servers
    assert second == same
    assert len({first, second, last}) == 3
    for pid in (first, second):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            raise AssertionError(f"the replaced server {pid} is still running")


def test_a_server_that_lacks_what_is_needed_is_started_anew() -> None:
    code = "from tests.process.testing.test_fork_server import replace_servers; replace_servers()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
