"""What TensorFlow prints in a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_kit.process import tensorflow_log


@pytest.mark.parametrize(("has_driver", "level"), [(True, "2"), (False, "3")])
def test_errors_of_tensorflow_are_shown_on_machines_with_a_gpu(
    has_driver: bool, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(tensorflow_log, "_DRIVERS", (str(driver),))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")

    tensorflow_log.quiet_tensorflow()

    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == level


def test_the_users_level_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")

    tensorflow_log.quiet_tensorflow()

    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
