"""Hyper-parameters that change while a run goes on: the same after kills."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np

from tests.process.end_to_end.killed_experiment import killed_at
from trainer_kit.files import read_lines
from trainer_kit.testing import ForkServer, compare_runs

MODULE = "tests.process.end_to_end.hyper_parameters_experiment"


def test_changes_are_the_same_after_kills(tmp_path: Path) -> None:
    def arguments(folder: Path) -> list[str]:
        return [f"--import_module={MODULE}", "--experiment=changed", "--mode=train_and_eval", f"--model_dir={folder}"]

    whole, hit = tmp_path / "whole", tmp_path / "hit"
    with ForkServer([MODULE]) as server:
        uninterrupted = server.start("train", *arguments(whole))
        # At the evaluation of step 30: the file was read at 25, and the checkpoint is of 20. Then at that of 45.
        for _ in range(2):
            death = server.run(killed_at, "ledger.append", 2, f"{hit}.points", *arguments(hit))
            assert death.code == -signal.SIGKILL, death.text
        last = server.run("train", *arguments(hit))
        assert last.code == 0, last.text
        assert uninterrupted.wait().code == 0
    assert compare_runs(whole, hit) == []
    lines = [line for line in read_lines(hit / "metrics.jsonl") if line["kind"] == "change"]
    assert [(line["step"], line["metrics"]) for line in lines] == [
        (0, {"loss_weight": 0.01}),
        (12, {"loss_weight": 0.5}),
        (25, {"head.learning_rate": 0.003}),
        (30, {"rest.learning_rate_factor": 0.1}),
        (33, {"loss_weight": 2.0}),
        (45, {"rest.learning_rate_factor": float(np.float32(0.1)) * 0.1}),
        (50, {"loss_weight": 0.01 / 3}),
    ]
