"""The experiment `gan`: its measure, and a few real steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import trainer_kit
from trainer_kit.experiments.gan import NeighbourTest, gan, load_images

SHORT = {"train_steps": 20, "steps_per_loop": 10, "validation_interval": 20}


def measure(real: np.ndarray, generated: np.ndarray) -> float:
    metric = NeighbourTest("told_apart")
    metric.update_state(real, generated)
    return float(metric.result())


def test_only_images_like_the_real_ones_are_not_told_apart() -> None:
    train, held_out = load_images()
    noise = np.random.default_rng(0).uniform(-1, 1, held_out.shape).astype(np.float32)

    assert measure(held_out, train[:360]) == pytest.approx(0.5, abs=0.05)
    assert measure(held_out, noise) > 0.95
    # A copy of one image again and again is none of many kinds.
    assert measure(held_out, np.repeat(train[:1], 360, axis=0)) > 0.95


def test_a_short_run_trains_both_nets_and_draws_digits(tmp_path: Path) -> None:
    model, logs = trainer_kit.launch(gan().replace(trainer=SHORT), "train_and_eval", str(tmp_path))

    assert math.isfinite(logs["validation_loss"])
    assert 0.5 < logs["told_apart"] <= 1
    assert (tmp_path / "samples" / "step-00000020.png").is_file()

    images = np.asarray(model(np.zeros([3, model.latent_size], np.float32)))
    assert images.shape == (3, 8, 8, 1)
    assert np.abs(images).max() <= 1
