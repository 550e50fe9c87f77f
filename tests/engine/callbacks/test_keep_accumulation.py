"""A run keeps the number of micro-batches that it was begun with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.linear_task import linear_experiment
from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.errors import ConfigError
from trainer_kit.run.launcher import launch


class _Look(Callback):
    """Notes the number of micro-batches that training loops had."""

    seen: Any = None

    def loop_end(self, run: Run, logs: Any) -> None:
        self.seen = run.trainer.accumulation.steps


def _train(folder: Path, steps: int, accumulate_steps: int | str = "auto") -> Any:
    """Trains up to `steps`; returns the number of micro-batches that did it."""
    config = linear_experiment(train_steps=steps, checkpoint_interval=2, accumulate_steps=accumulate_steps)
    look = _Look()
    launch(config, "train", str(folder), callbacks=[look])
    return look.seen


def _manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def test_the_choice_is_in_the_manifest_and_a_resume_keeps_it(tmp_path: Path) -> None:
    assert _train(tmp_path, 4) == 1
    assert _manifest(tmp_path)["accumulate_steps"] == 1
    (tmp_path / "manifest.json").write_text(json.dumps({**_manifest(tmp_path), "accumulate_steps": 4}))
    assert _train(tmp_path, 8) == 4
    assert _manifest(tmp_path)["accumulate_steps"] == 4
    with pytest.raises(ConfigError, match=r"trainer\.accumulate_steps: was 4 when this run began and is 2 now"):
        _train(tmp_path, 12, 2)


def test_a_number_of_the_config_is_not_changed(tmp_path: Path) -> None:
    assert _train(tmp_path, 4, 2) == 2
    assert _manifest(tmp_path)["accumulate_steps"] == 2
