"""The executor of TensorFlow functions."""

from __future__ import annotations

from tensorflow.python.eager import context

from trainer_kit.runtime.executor import use_executor


def _read_type() -> str:
    return str(context.context().function_call_options.executor_type or "")


def test_the_single_threaded_executor_is_used_only_inside() -> None:
    before = _read_type()

    with use_executor("single_threaded"):
        assert _read_type() == "SINGLE_THREADED_EXECUTOR"

    assert _read_type() == before


def test_the_default_is_left_alone() -> None:
    with use_executor("default"):
        assert _read_type() == ""
