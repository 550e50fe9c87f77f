"""What lasts as long as the process is not looked at by the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from tests.fork_server import ForkServer
from trainer_kit import train
from trainer_kit.process.gc_freeze import gc_frozen


class Node:
    """Something that refers to itself, and so is left to the collector."""

    def __init__(self) -> None:
        self.own = self


def collect_garbage() -> None:
    """Of what was made inside nothing is collected, and of what is made later everything."""
    with gc_frozen():
        assert not gc.isenabled()
        inside = weakref.ref(Node())
    assert gc.isenabled()
    outside = weakref.ref(Node())
    gc.collect()
    assert inside() is not None and outside() is None
    try:
        with gc_frozen():
            raise ImportError
    except ImportError:
        assert gc.isenabled()
    gc.disable()
    with gc_frozen():
        pass
    assert not gc.isenabled()


def run_the_command() -> None:
    """`python -m trainer_kit.train` leaves its imports to nobody, and goes on with a collector that runs."""
    gc.unfreeze()
    argv = ["--experiment=digits_mlp", "--mode=eval", "--model_dir=nothing/here", "--checkpoint=5"]
    assert train.main(["train", *argv]) != 0
    assert gc.isenabled() and gc.get_freeze_count() > 100_000


@pytest.mark.parametrize("function", [collect_garbage, run_the_command])
def test_imports_are_spared_by_the_collector_and_nothing_else_is(function: Callable[[], None]) -> None:
    with ForkServer() as server:
        ended = server.run(function)
    assert ended.code == 0, ended.text
