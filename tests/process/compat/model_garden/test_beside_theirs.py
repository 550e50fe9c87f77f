"""Theirs beside ours in one process: the same seed and the same data give the same losses and the same metrics.

`python -m tests.engine.compat.model_garden.tiny.beside` does this for all of the tiny experiments, each in a process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tf_keras

from tests.engine.compat.model_garden.garden_task import eagerly
from tests.engine.compat.model_garden.tiny import trainer
from tests.engine.compat.model_garden.tiny.beside import RAGGED, apart, run_ours
from tests.engine.compat.model_garden.tiny.run_theirs import run_theirs


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_a_model_garden_experiment_has_the_same_curves_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "STEPS", 14)  # two epochs and a third, which has evaluations in the middle
    monkeypatch.setattr(trainer, "INTERVAL", 7)
    with eagerly():
        theirs = run_theirs(name, tmp_path / "data", tmp_path / "theirs", 1, 4)
    tf_keras.backend.clear_session()
    found = apart(theirs, run_ours(name, tmp_path / "data", tmp_path / "ours", 1, 4))
    assert [*theirs["train"]] == [4, 7, 11, 14] and [*theirs["validation"]] == [7, 14]
    assert found.missing == ()
    assert found.losses <= 1e-5
    assert found.metrics <= 1e-5
    if name in RAGGED:
        assert found.validation_loss > 1e-4  # theirs counts a last batch that is not full like any other
    else:
        assert found.validation_loss <= 1e-5
