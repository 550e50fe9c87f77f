"""The environment variables of TensorFlow and Keras in a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_kit.errors import UsageError
from trainer_kit.process import environment


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment of a machine without variables and devices."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(environment, "_DEVICES", (str(tmp_path / "nvidiactl"),))


def test_errors_are_left_out_without_a_device() -> None:
    environment.prepare_environment()

    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"


def test_errors_are_shown_with_a_device(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()

    environment.prepare_environment()

    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"


def test_errors_are_shown_in_a_cluster() -> None:
    os.environ["TF_CONFIG"] = "{}"

    environment.prepare_environment()

    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"


def test_the_users_level_is_kept() -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"

    environment.prepare_environment()

    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"


@pytest.mark.parametrize("backend", ["", "tensorflow"])
def test_keras_may_run_on_tensorflow(backend: str) -> None:
    os.environ["KERAS_BACKEND"] = backend

    environment.prepare_environment()


def test_another_backend_of_keras_is_refused() -> None:
    os.environ["KERAS_BACKEND"] = "jax"

    with pytest.raises(UsageError, match=r"KERAS_BACKEND=jax: trainer_kit trains with .*; unset"):
        environment.prepare_environment()
