"""When the best weights of a run are exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.callbacks.base import Run
from trainer_kit.callbacks.best_checkpoint import KeepBest
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.trainer_creation import create_trainer


def _listed(folder: Path, chief: bool = True) -> CallbackList:
    config = tiny_experiment()
    best = BestCheckpoint(str(folder), "accuracy")
    trainer = create_trainer(config, TinyTask(config.task), True, True, best)
    return CallbackList(Run(trainer, str(folder), chief), [KeepBest()])


def _evaluate(listed: CallbackList) -> dict[str, Any]:
    logs: dict[str, Any] = listed.run.trainer.evaluate(tf.constant(1))
    return logs


def _exported(folder: Path) -> bool:
    return bool(complete_checkpoints(str(folder)))


@pytest.mark.parametrize("chief", [True, False])
def test_the_best_is_exported_at_its_turn_on_every_worker(tmp_path: Path, chief: bool) -> None:
    listed = _listed(tmp_path, chief)
    with listed.around("run"):
        logs = _evaluate(listed)
        assert not _exported(tmp_path) and "best_accuracy" not in logs
        listed.call("evaluation_end", logs)
        assert _exported(tmp_path) and logs["best_accuracy"] == pytest.approx(logs["accuracy"])


def test_a_trainer_keeps_its_best_itself_after_a_run_that_failed(tmp_path: Path) -> None:
    listed = _listed(tmp_path)
    with pytest.raises(ZeroDivisionError), listed.around("run"):
        raise ZeroDivisionError
    assert "best_accuracy" in _evaluate(listed) and _exported(tmp_path)
