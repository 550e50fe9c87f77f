"""The experiment `tabular`: a short run on a table of the user's, with gaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from keras.layers import Normalization

import trainer_kit as tk
from trainer_kit.experiments.tabular import TabularTask


def test_a_short_run_learns_from_a_table_with_gaps(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = pd.DataFrame({"size": random.normal(50, 9, 400), "code": random.integers(1, 4, 400)})
    table["rent"] = 10 * table["size"] + 200 * table["code"]
    table = table.mask(random.random(table.shape) < 0.05)
    table.to_csv(tmp_path / "rents.csv", index=False)
    columns = {"target": "rent", "numbers": ("size",), "categories": ("code",)}
    short = {"train_steps": 200, "steps_per_loop": 200, "validation_interval": 200}
    config = tk.get_experiment("tabular").replace(
        task={"path": str(tmp_path / "rents.csv"), **columns}, trainer=short
    )

    model, logs = tk.launch(config, "train_and_eval", str(tmp_path / "run"), experiment="tabular")

    task = TabularTask(config.task)
    size = task.training["size"]
    assert len(task.training) + len(task.held_out) == table["rent"].count()
    assert not set(task.training.index) & set(task.held_out.index)
    normalization = next(one for one in model.layers if isinstance(one, Normalization))
    assert float(normalization.mean[0, 0]) == pytest.approx(size.mean())
    median_error = (task.held_out["rent"] - task.training["rent"].median()).abs().mean()
    assert logs["mean_absolute_error"] < median_error / 2

    # A new category and a gap get a prediction, too.
    rows = {"size": np.array([50, np.nan], "float32"), "code": np.array(["7", "2"])}
    assert np.isfinite(tk.predict(tmp_path / "run", rows)["outputs"]).all()
