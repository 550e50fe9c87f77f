"""What all tests share: four logical CPU devices, for real runs on several replicas."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent
# A file system in memory, and the free bytes that all tests need of it.
_IN_MEMORY = "/dev/shm"
_NEEDED_BYTES = 4 * 2**30
# After so many seconds a garbage collection has deleted the other references to what it finds.
_COLLECTION_SECONDS = 1.0

# Runs wait for the disk at each fsync, some hundred thousand times in all tests; pytest names the
# variable.
if os.access(_IN_MEMORY, os.W_OK) and shutil.disk_usage(_IN_MEMORY).free > _NEEDED_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _IN_MEMORY)

# To compile a training step with XLA takes a third less time without LLVM's optimizations, which no
# test is about.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# A shell has background commands ignore Ctrl-C, and nohup has them ignore SIGHUP. The processes
# that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# TensorFlow lists the values that a checkpoint's reader left out when the reader is deleted: in any
# later test, which may count its own warnings.
logging.getLogger("tensorflow").addFilter(lambda record: record.funcName != "__del__")


def pytest_collectstart() -> None:
    """Switches garbage collection off while test modules import TensorFlow, which stays."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first, so that short ones fill up both workers at the end.

    A file stays with one worker.
    """
    order = [
        _TESTS / "process" / "end_to_end",
        _TESTS / "process",
        _TESTS / "engine",
        _TESTS / "unit",
    ]
    ranks: dict[Path, int] = {}
    for file in {item.path for item in items}:
        places = [rank for rank, folder in enumerate(order) if folder in file.parents]
        if not places:
            raise pytest.UsageError(f"move {file} into tests/unit, tests/engine or tests/process")
        ranks[file] = places[0]

    items.sort(key=lambda item: ranks[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Splits the CPU after test modules are imported and before a test runs.

    There is nothing to do without TensorFlow.
    """
    del session
    gc.freeze()
    gc.enable()
    # A trace makes many objects: with Python's own numbers 15 % of the time goes into collections.
    gc.set_threshold(50_000, 20, 100)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return
    _delete_iterators_in_threads()
    try:
        cpu = tensorflow.config.list_physical_devices("CPU")[0]
        tensorflow.config.set_logical_device_configuration(
            cpu, [tensorflow.config.LogicalDeviceConfiguration()] * 4
        )
    except RuntimeError as error:
        raise pytest.UsageError(
            "a test module uses TensorFlow when it is imported, such as in a parametrization, so"
            " that the CPU cannot be split any more; make datasets and tensors in functions"
        ) from error


def _delete_iterators_in_threads() -> None:
    """Lets a test go on while the destructors of its iterators wait, each for up to a minute.

    trainer_kit.inputs.dataset_iterator says what they wait for, and does the same to the iterators
    of a run. These are of tests, and of the programs of others that tests run.
    """
    for module, name, resource in (
        ("iterator_ops", "OwnedIterator", "_iterator_resource"),
        (
            "multi_device_iterator_ops",
            "OwnedMultiDeviceIterator",
            "_multi_device_iterator_resource",
        ),
    ):
        iterator_class = getattr(sys.modules[f"tensorflow.python.data.ops.{module}"], name)

        def delete(iterator: Any, resource: str = resource) -> None:
            if not sys.is_finalizing():
                last_references = [
                    iterator.__dict__.pop(resource, None),
                    iterator.__dict__.pop("_components", None),
                ]
                threading.Timer(_COLLECTION_SECONDS, last_references.clear).start()

        iterator_class.__del__ = delete


@pytest.fixture(scope="session")
def orbit() -> Any:
    """The package Orbit, which comes with Model Garden. Without it a test is skipped."""
    return pytest.importorskip("orbit")


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """Sets the level of our logger back, which the command line raises.

    Later tests count their own warnings.
    """
    logger = logging.getLogger("trainer_kit")
    level = logger.level

    yield

    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def no_garbage() -> Iterator[None]:
    """Deletes what the tests of a module leave, so that no later test takes the time for it.

    What survives is kept by caches. Later collections need not look at it again, which took a
    second each in the end.
    """
    yield
    if "tensorflow" in sys.modules:
        gc.collect()
        gc.freeze()
