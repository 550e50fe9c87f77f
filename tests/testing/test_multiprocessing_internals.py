"""The private names of multiprocessing: that they end the fork server, and what happens without them."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from scripts.source_files import ROOT
from trainer_kit.testing.multiprocessing_internals import stop_fork_server

_SCRIPT = """
import multiprocessing, os
from trainer_kit.testing.multiprocessing_internals import stop_fork_server

def server(pipe):
    pipe.send(os.getppid())

if __name__ == "__main__":
    context, servers = multiprocessing.get_context("forkserver"), []
    stop_fork_server()  # there is none yet
    for stop in (False, True, False):
        here, there = context.Pipe()
        child = context.Process(target=server, args=(there,))
        child.start()
        servers.append(here.recv())
        child.join()
        if stop:
            stop_fork_server()
    assert servers[0] == servers[1] != servers[2], servers
"""


def test_the_server_ends_and_the_next_child_has_another(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(tmp_path / "script.py")], check=True, timeout=60, env=environment)


def test_without_the_names_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(forkserver, "_forkserver")
    stop_fork_server()
