"""The tiny task, which other tests stand on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer_kit.run.launcher import launch
from trainer_kit.testing import CLASSES, EXAMPLES, FEATURES, tiny_arrays, tiny_experiment


def test_the_two_datasets_differ_and_are_the_same_at_each_call() -> None:
    for training in (True, False):
        points, labels = tiny_arrays(training)
        assert points.shape == (EXAMPLES, FEATURES)
        assert points.dtype == np.float32
        assert labels.dtype == np.int32
        assert set(labels) == set(range(CLASSES))
        tiny_arrays.cache_clear()
        np.testing.assert_array_equal(points, tiny_arrays(training)[0])

    assert not np.array_equal(tiny_arrays(True)[0], tiny_arrays(False)[0])


def test_the_rule_is_learned_and_holds_for_the_validation_points(tmp_path: Path) -> None:
    config = tiny_experiment(
        train_steps=200,
        validation_interval=200,
        checkpoint_interval=200,
        steps_per_loop=100,
        summary_interval=100,
    )
    _, logs = launch(config, "train_and_eval", str(tmp_path), save_summary=False)

    assert logs["accuracy"] > 0.8
