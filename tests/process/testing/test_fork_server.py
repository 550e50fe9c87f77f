"""Children of the fork server behave as processes of their own that begin with TensorFlow imported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.fork_server import Child, ForkServer
from trainer_kit.errors import UsageError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One server for all tests."""
    with ForkServer() as server:
        yield server


def tell(*words: str) -> None:
    """Says what a child is like."""
    import tensorflow as tf

    print(*words, os.getpid() == os.getsid(0), os.getcwd(), len(tf.config.list_logical_devices("CPU")))
    print("to standard error", file=sys.stderr)


def split_the_cpu() -> None:
    """Possible only where TensorFlow was not used before."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.device("CPU:1"):
        raise SystemExit(int(tf.reduce_sum(tf.ones([3])).numpy()))


def know(module: str) -> None:
    """Tells which process is the server, and by the exit code whether a module is imported."""
    print(os.getppid())
    raise SystemExit(0 if module in sys.modules else 3)


def fail() -> None:
    """Ends as a bug does."""
    raise ValueError("what went wrong")


def wait_for_a_signal() -> None:
    """Says when it is there, and stays."""
    print("here", flush=True)
    signal.pause()


def test_a_child_has_a_session_its_folder_and_its_output(server: ForkServer, tmp_path: Path) -> None:
    ended = server.run(tell, "a", "b", folder=str(tmp_path))
    assert ended.code == 0, ended.text
    assert f"a b True {tmp_path} 1\n" in ended.text
    assert ended.text.endswith("to standard error\n")


def test_tensorflow_is_imported_and_unused_in_each_child(server: ForkServer) -> None:
    for _ in range(2):
        ended = server.run(split_the_cpu)
        assert ended.code == 3, ended.text


def test_an_exception_is_exit_1_with_its_traceback(server: ForkServer) -> None:
    ended = server.run(fail)
    assert ended.code == 1
    assert "ValueError: what went wrong" in ended.text


def test_a_child_can_be_killed_and_waited_for(server: ForkServer) -> None:
    child = server.start(wait_for_a_signal)
    with pytest.raises(TimeoutError, match="here"):
        _wait_for_text(child)
        child.wait(0.01)
    child.kill(signal.SIGTERM)
    ended = child.wait(30)
    assert (ended.code, ended.text, child.alive) == (-signal.SIGTERM, "here\n", False)
    child.kill()  # of a process that is gone: nothing
    assert child.wait(1).code == -signal.SIGTERM


def test_a_run_that_takes_too_long_is_killed(server: ForkServer) -> None:
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.2 s"):
        server.run(wait_for_a_signal, timeout=0.2)


def test_leaving_the_server_ends_its_children() -> None:
    with ForkServer() as server:
        child = server.start(wait_for_a_signal)
    assert not child.alive


def replace_servers() -> None:
    """In a process of its own, whose servers import little: what replaces them is the same, and takes no seconds."""
    fork_server._PRELOADED = "colorsys"
    servers = []
    for needs, code in (((), 3), (["poplib"], 0), ((), 0), (["imaplib"], 0)):  # modules that nothing else imports
        with ForkServer(needs=needs) as server:
            ended = server.run(know, "poplib")
        assert ended.code == code, ended.text
        servers.append(int(ended.text))
    first, second, same, last = servers
    assert second == same and len({first, second, last}) == 3
    for replaced in (first, second):
        with contextlib.suppress(ProcessLookupError):
            os.kill(replaced, 0)
            raise AssertionError(f"the replaced server {replaced} is still there")


def test_a_server_that_lacks_what_is_needed_is_started_anew() -> None:
    code = "from tests.process.testing.test_fork_server import replace_servers; replace_servers()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_train_is_the_command_with_its_exit_codes(server: ForkServer, tmp_path: Path) -> None:
    ended = server.run("train", "--experiment=none", "--mode=train", f"--model_dir={tmp_path}/run")
    assert ended.code == 2
    assert ended.text.startswith("error: --experiment: no experiment is called 'none'")
    assert len(ended.text.splitlines()) == 1


def test_another_name_is_refused(server: ForkServer) -> None:
    with pytest.raises(UsageError, match="'trian' is not a run"):
        server.start("trian")


def _wait_for_text(child: Child) -> None:
    give_up = time.monotonic() + 30
    while not child.text and time.monotonic() < give_up:
        time.sleep(0.01)
