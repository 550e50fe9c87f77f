"""What all tests share: four logical CPU devices, for real runs on several replicas."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from pathlib import Path

import pytest

from trainer_kit.process.deferred_imports import defer_imports

defer_imports()  # before a test module imports Keras

# A shell has background commands ignore Ctrl-C, and nohup has them ignore SIGHUP. The processes that tests start would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# TensorFlow lists the values that a checkpoint's reader left out when the reader is deleted: in any later test, which
# may count its own warnings.
logging.getLogger("tensorflow").addFilter(lambda record: record.funcName != "__del__")


def pytest_collectstart() -> None:
    """What the test modules import, TensorFlow above all, lasts: as `garbage.lasting` has it."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that the short ones fill up both workers at the end: a file stays with one worker."""
    tests = Path(__file__).parent
    order = [tests / "end_to_end", tests]
    items.sort(key=lambda item: order.index(item.path.parent) if item.path.parent in order else len(order))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Splits the CPU, after test modules are imported and before a test runs; nothing to do without TensorFlow."""
    del session
    gc.freeze()
    gc.enable()
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return
    try:
        cpu = tensorflow.config.list_physical_devices("CPU")[0]
        tensorflow.config.set_logical_device_configuration(cpu, [tensorflow.config.LogicalDeviceConfiguration()] * 4)
    except RuntimeError:  # a module used TensorFlow while it was imported: its devices cannot be changed any more
        pass
