"""Tensorpack's own unit tests, with their imports pointed at the door."""

from __future__ import annotations

import types
import unittest
from pathlib import Path

import pytest

from trainer_kit.compat.tensorpack.installed_package import DOOR, find_original_folder

# The number of tests by module.
MODULES = {
    "callbacks.param_test": 6,
    "dataflow.imgaug.imgaug_test": 4,
    "dataflow.serialize_test": 4,
    "models.models_test": 3,
    "tfutils.unit_tests": 2,
}


def load_tests(name: str) -> unittest.TestSuite:
    """Returns the tests of a module. Its relative imports find the door's modules."""
    path = Path(find_original_folder(), *name.split(".")).with_suffix(".py")
    source = path.read_text()
    source = source.replace("import tensorflow as tf", f"from {DOOR} import tfv1 as tf")
    source = source.replace("from tensorpack.", f"from {DOOR}.")
    source = source.replace("'tensorpack.", f"'{DOOR}.")
    module = types.ModuleType(f"{DOOR}.{name}")
    module.__package__ = module.__name__.rpartition(".")[0]
    exec(compile(source, str(path), "exec"), vars(module))
    return unittest.defaultTestLoader.loadTestsFromModule(module)


@pytest.mark.parametrize("name", MODULES)
def test_package_tests_pass(name: str) -> None:
    result = unittest.TestResult()

    load_tests(name).run(result)

    assert not [text for _, text in [*result.errors, *result.failures]]
    assert result.testsRun == MODULES[name]
