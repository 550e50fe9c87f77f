"""The experiment `time_series`: its windows, and a short run on a series that grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import trainer_kit as tk
from trainer_kit.experiments.time_series import TimeSeriesTask


def test_a_short_run_goes_on_with_a_trend_without_leaks(tmp_path: Path) -> None:
    path = tmp_path / "series.csv"
    path.write_text("load\n" + "\n".join(map(str, range(500))))  # each value is its own position
    task = {"path": str(path), "column": "load", "history": 24, "horizon": 6}
    short = {"train_steps": 100, "steps_per_loop": 100, "validation_interval": 100}
    config = tk.get_experiment("time_series").replace(task=task, trainer=short)

    _, logs = tk.launch(config, "train_and_eval", str(tmp_path / "run"), experiment="time_series")

    # Each value is 6 above the one a horizon ago. No value of 400 or more was trained on.
    assert logs["mean_absolute_error"] < 2

    inputs = TimeSeriesTask(config.task).build_inputs
    training = inputs(config.task.train_data.replace(global_batch_size=371))
    histories, targets = next(iter(training.at(0).as_numpy_iterator()))
    assert (histories.shape, targets.shape) == ((371, 24), (371, 6))
    assert (histories[:, -1] + 1 == targets[:, 0]).all()
    assert targets.max() == 399

    held_out = inputs(config.task.validation_data)
    later = np.concatenate([targets for _, targets in held_out.at(0).as_numpy_iterator()])
    assert (later.min(), later.max()) == (400, 499)
