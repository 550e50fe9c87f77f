"""A process that runs the Python commands of pages one after the other, most of them without a cold
start.

A command of its own process spends most of its time in what TensorFlow does once in a process. Here
each command begins with a folder, arguments and an environment of its own, and without the modules,
registrations, flags and seeds of the command before it. What TensorFlow keeps for a whole process
stays: op determinism, devices.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import runpy
import shlex
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

_TRAIN = ["python", "-m", "trainer_kit.train"]


def serve(commands: Connection) -> None:
    """Runs a command for each (folder, line) and answers with its exit code; what it writes is this
    process's output.

    The CPU is two devices, for the page that asks for them.
    """
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    gc.set_threshold(50_000, 20, 100)  # as in tests/conftest.py
    _forget_registrations()  # of what the fork server has imported for other tests
    while True:
        folder, line = commands.recv()
        with _as_if_new(folder):
            code = _run_to_exit_code(line)
        sys.stdout.flush()
        sys.stderr.flush()
        commands.send(code)


def run_in_background(line: str) -> None:
    """Does what a command of Python alone does, in a process of its own."""
    sys.exit(_perform(line))


def _perform(line: str) -> int:
    words = shlex.split(line)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    if words[:3] == _TRAIN:
        from trainer_kit.train import main

        sys.argv = words[2:]  # a run records its command
        return main()
    if words[0] == "trainer-kit":
        from trainer_kit.cli.main import main as kit

        return kit(words[1:])
    sys.argv = words[1:]
    runpy.run_path(words[1], run_name="__main__")
    return 0


def _run_to_exit_code(line: str) -> int:
    try:
        return int(_perform(line))
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        if isinstance(error.code, int):
            return error.code
        return int(error.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def _as_if_new(folder: str) -> Iterator[None]:
    import keras
    import numpy as np
    import tensorflow as tf
    from absl import flags

    from tests.builders import restore_registries
    from tests.tensorpack_state import reset_tensorpack
    from trainer_kit.config.experiment_registry import experiments

    argv = sys.argv
    path = [*sys.path]
    environment = dict(os.environ)
    flag_names = {*flags.FLAGS}
    os.chdir(folder)
    sys.path.insert(0, folder)
    keras.utils.clear_session()  # the names of layers count from the beginning
    keras.config.set_dtype_policy("float32")
    tf.random.set_seed(None)
    random.seed()
    np.random.seed()
    try:
        with restore_registries(experiments, empty=True):
            yield
    finally:
        reset_tensorpack()
        sys.argv = argv
        sys.path[:] = path
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update(environment)
        for name in {*flags.FLAGS} - flag_names:
            delattr(flags.FLAGS, name)
        _forget(folder)


def _forget(folder: str) -> None:
    """Forgets the modules of a page and what they have registered, so that each command has to
    import its own.
    """
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    for name, file in files.items():
        is_of_page = isinstance(file, str) and file.startswith(folder + os.sep)
        if is_of_page or "experiments" in name.split(".")[:2]:
            del sys.modules[name]
    _forget_registrations()


def _forget_registrations() -> None:
    """Forgets what was registered, but for what trainer_kit itself has."""
    from tests.builders import remove_user_entries
    from trainer_kit.callbacks.configured_callbacks import _callbacks
    from trainer_kit.config.schema.open_choice import OpenOneOfConfig

    choices = (choice.registry for choice in OpenOneOfConfig.__subclasses__())
    remove_user_entries(_callbacks, *choices)
