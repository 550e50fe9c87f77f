"""Tests of this tier use no TensorFlow, in no process: they are for the inner loop of work."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_tensorflow() -> Iterator[None]:
    """Fails a test that imports TensorFlow, which takes seconds; such a test belongs to
    tests/engine.

    It sees imports inside of functions, while this tier runs by itself.
    tests/unit/test_architecture.py finds those at the top of a module.
    """
    before = "tensorflow" in sys.modules
    yield
    assert before or "tensorflow" not in sys.modules, (
        "this test has imported TensorFlow; move it to tests/engine"
    )
