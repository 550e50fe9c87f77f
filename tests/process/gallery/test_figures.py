"""Whole runs of the experiments of the gallery reach their figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# The metric of each experiment, and the bound that its best value has to keep.
FIGURES: list[tuple[str, str, float, str]] = [
    ("circle", "accuracy", 0.97, "at least"),
    ("image_folder", "accuracy", 0.93, "at least"),
    ("finetune_frozen", "accuracy", 0.97, "at least"),  # its first run
    ("text_classification", "accuracy", 0.89, "at least"),
    ("tabular", "mean_absolute_error", 1.13, "at most"),
    ("time_series", "mean_absolute_error", 13.5, "at most"),
    ("recommender", "rmse", 0.57, "at most"),
    ("vae", "squared_error", 0.037, "at most"),
    ("contrastive", "precision_at_10", 0.95, "at least"),
    ("distillation", "accuracy", 0.97, "at least"),  # the teacher
    ("gan", "told_apart", 0.7, "at most"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "metric", "bound", "side"), FIGURES, ids=lambda value: str(value))
def test_a_whole_run_reaches_its_figure(
    name: str, metric: str, bound: float, side: str, tmp_path: Path
) -> None:
    flags = [f"--experiment={name}", "--mode=train_and_eval", f"--model_dir={tmp_path}/run"]
    subprocess.run(
        [sys.executable, "-m", "trainer_kit.train", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        check=True,
    )

    info = json.loads((tmp_path / "run" / "best_ckpt" / "info.json").read_text())

    value = info["metrics"][metric]
    assert value >= bound if side == "at least" else value <= bound
