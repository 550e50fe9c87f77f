"""A run keeps to the executor that it was begun with."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.linear_task import linear_experiment
from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.errors import ConfigError, PreemptedError
from trainer_kit.run.launcher import launch


class _Look(Callback):
    """Notes the executor that training loops had."""

    seen = ""

    def loop_end(self, run: Run, logs: Any) -> None:
        self.seen = run.trainer.executor


def _train(folder: Path, steps: int, executor: str = "auto") -> str:
    """Trains up to `steps`; returns the executor that did it."""
    config = linear_experiment(train_steps=steps, checkpoint_interval=2).replace(runtime={"executor": executor})
    look = _Look()
    launch(config, "train", str(folder), callbacks=[look])
    return look.seen


def _manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def test_the_choice_is_in_the_manifest_and_a_resume_keeps_it(tmp_path: Path) -> None:
    assert _train(tmp_path, 4) == "single_threaded"
    assert _manifest(tmp_path)["executor"] == "single_threaded"
    (tmp_path / "manifest.json").write_text(json.dumps({**_manifest(tmp_path), "executor": "default"}))
    assert _train(tmp_path, 8) == "default"
    with pytest.raises(ConfigError, match=r"runtime\.executor: was 'default'"):
        _train(tmp_path, 12, executor="single_threaded")
    old = _manifest(tmp_path)
    del old["executor"]
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    assert _train(tmp_path, 12) == "default"  # a run of an earlier release keeps what it had


class _StopsInTheLoop(Callback):
    """Asks for a stop from another thread, once the first loop has done steps."""

    def loop_begin(self, run: Run, steps: int) -> None:
        threading.Thread(target=self._stop, args=(run.trainer,)).start()

    def _stop(self, trainer: Any) -> None:
        while int(trainer.global_step.numpy()) < 2:
            time.sleep(0.01)
        trainer.request_stop()


def test_the_choice_of_a_loop_that_was_stopped_is_kept(tmp_path: Path) -> None:
    many = dict.fromkeys(["train_steps", "steps_per_loop", "summary_interval", "checkpoint_interval"], 10**6)
    config = linear_experiment(**many).replace(runtime={"executor": "auto"})
    with pytest.raises(PreemptedError):
        launch(config, "train", str(tmp_path), callbacks=[_StopsInTheLoop()])
    assert complete_checkpoints(str(tmp_path))
    assert _manifest(tmp_path)["executor"] == "single_threaded"
