"""The experiment `recommender`: a short run on ratings that only the vectors can explain."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd

import trainer_kit as tk
from trainer_kit.experiments.recommender import RecommenderTask

PAIR = ["user", "item"]


def test_a_short_run_learns_taste_from_a_file_of_ratings(tmp_path: Path) -> None:
    # Each user likes every second item, so that no mean of a user or an item tells anything.
    pairs = list(itertools.product(range(40), range(30)))
    ratings = pd.DataFrame(pairs, columns=PAIR)
    ratings["rating"] = np.where((ratings["user"] + ratings["item"]) % 2, 1, 5)
    path = tmp_path / "ratings.csv"
    pd.concat([ratings, ratings.head(100)]).to_csv(path, index=False)
    short = {"train_steps": 200, "steps_per_loop": 200, "validation_interval": 200}
    config = tk.get_experiment("recommender").replace(task={"path": str(path)}, trainer=short)

    _, logs = tk.launch(config, "train_and_eval", str(tmp_path / "run"), experiment="recommender")

    assert logs["rmse"] < 0.8  # a mean: 2
    assert logs["validation_loss"] > logs["rmse"] ** 2  # what the regularizers add

    task = RecommenderTask(config.task)
    assert len(task.training) + len(task.held_out) == len(ratings)
    assert task.training.merge(task.held_out, on=PAIR).empty

    rows = {"user": np.array(["0", "0", "new"]), "item": np.array(["2", "3", "3"])}
    liked, disliked, unknown = tk.predict(tmp_path / "run", rows)["outputs"][:, 0]
    assert liked > 4
    assert disliked < 2
    assert 2.5 < unknown < 3.5
