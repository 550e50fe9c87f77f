"""Runs training commands one after the other in one process that has TensorFlow: most end before
their first step.

A fork for each would trace and convert the same functions anew.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
from pathlib import Path

import keras

from tests.builders import restore_registries
from trainer_kit.config.experiment_registry import experiments
from trainer_kit.train import main


def answer(requests: str, replies: str) -> None:
    """Reads lines from one fifo: the arguments, and a file for what is written, in JSON; writes
    exit codes to another.

    Modules and experiments that a command has brought are gone before the next one.
    """
    with Path(requests).open() as lines, Path(replies).open("w") as codes:
        for line in lines:
            arguments, file = json.loads(line)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
            modules = set(sys.modules)
            with restore_registries(experiments):
                code = main(["trainer_kit.train", *arguments])
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for name in set(sys.modules) - modules:
                del sys.modules[name]
            keras.utils.clear_session()
            linecache.clearcache()  # AutoGraph would read lambdas of an earlier module of this name
            print(code, file=codes, flush=True)
