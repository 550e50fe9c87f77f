"""Several best checkpoints of one run, each in its folder, with real files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.best.exporter import BestCheckpoint


def _named(folder: Path) -> int:
    return int(json.loads((folder / "info.json").read_text())["step"])


def _both(folder: Path) -> BestCheckpoints:
    primary = BestCheckpoint(str(folder / "best_ckpt"), "accuracy")
    option = "trainer.best_checkpoints.loss.metric"
    return BestCheckpoints(primary, {"loss": BestCheckpoint(str(folder / "loss"), "far|loss", "lower", option=option)})


def test_each_best_has_its_metric_and_the_primary_is_reported(tmp_path: Path) -> None:
    bests, checkpoint = _both(tmp_path), tf.train.Checkpoint(value=tf.Variable(0))
    for step, (accuracy, loss) in enumerate([(0.5, 2.0), (0.4, 1.0), (0.4, 3.0)], 1):
        bests.maybe_export_checkpoint(checkpoint, {"accuracy": accuracy, "far": {"loss": loss}}, step)
    assert bests.best == ("accuracy", 0.5, 1) and bests.best_ckpt_logs == {"accuracy": 0.5, "far|loss": 2.0}
    assert [_named(tmp_path / folder) for folder in ("best_ckpt", "loss")] == [1, 2]
    recorded = [{"step": step, "metrics": {"accuracy": 0.5, "far": {"loss": 2.0}}} for step in (1, 2)]
    bests.rewind(1, iter(recorded))
    assert (tmp_path / "loss/archived/ckpt-2.index").exists() and (tmp_path / "best_ckpt/ckpt-1.index").exists()
    bests.resume(1, iter(recorded))
    assert [best.best for best in bests] == [("accuracy", 0.5, 1), ("far|loss", 2.0, 1)]


def test_without_a_primary_one_no_best_is_told(tmp_path: Path) -> None:
    bests = BestCheckpoints(None, _both(tmp_path).named)
    bests.maybe_export_checkpoint(tf.train.Checkpoint(value=tf.Variable(0)), {"far": {"loss": math.pi}}, 1)
    assert bests.best is None and bests.best_ckpt_logs is None
    assert _named(tmp_path / "loss") == 1


def test_an_unknown_metric_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"trainer\.best_checkpoints\.loss\.metric: 'far\|loss' is not a validation metric"
    ):
        [best.check_metric(["accuracy", "loss"]) for best in _both(tmp_path)]
