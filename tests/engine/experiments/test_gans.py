"""The experiments `gan_rings` and `gan_digits`: data, measures, and a short run of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from experiments.gan_digits.task import CoverageDistance, FidelityDistance, load_digit_images
from experiments.gan_rings.task import CoveredCenters, EnergyDistance, NearShare, sample_ring_points
from trainer_kit.run.launcher import launch

CENTERS = np.array([[2, 0], [0, 2], [-2, 0], [0, -2]], np.float32)


def test_a_center_counts_from_one_percent_of_the_points_near_it() -> None:
    points = np.concatenate(
        [np.repeat(CENTERS[:1], 97, 0), CENTERS[1:2], CENTERS[2:3] + 0.29, CENTERS[3:] + 0.31]
    )
    modes = CoveredCenters(CENTERS, 0.14)
    near = NearShare(CENTERS, 0.14)

    for metric in (modes, near):
        metric.update_state(points, points[:60])
        metric.update_state(points, points[60:])

    assert float(modes.result()) == 3.0
    assert float(near.result()) == pytest.approx(0.99)


def test_the_energy_distance_is_0_for_the_same_points_only() -> None:
    real = sample_ring_points(CENTERS, 0.1, 200, seed=0)
    same = EnergyDistance()
    shifted = EnergyDistance()
    collapsed = EnergyDistance()

    same.update_state(real, real)
    shifted.update_state(real, real + np.float32([3, 4]))
    collapsed.update_state(real, np.repeat(CENTERS[:1], 200, 0))

    assert float(same.result()) == pytest.approx(0, abs=1e-6)
    assert float(shifted.result()) > float(collapsed.result()) > 0.5


def test_the_distances_of_digits_tell_copies_from_coverage() -> None:
    images = load_digit_images()

    assert images.shape == (1797, 8, 8, 1)
    assert images.min() == -1
    assert images.max() == 1

    fidelity = FidelityDistance()
    coverage = CoverageDistance()

    for metric in (fidelity, coverage):
        metric.update_state(images[:50], np.repeat(images[:1], 50, 0))

    assert float(fidelity.result()) == 0
    assert float(coverage.result()) > 0.3


@pytest.mark.parametrize("name", ["gan_rings", "gan_digits"])
def test_a_short_run_reports_draws_and_keeps_its_best(name: str, tmp_path: Path) -> None:
    short = {"train_steps": 8, "steps_per_loop": 4, "summary_interval": 4, "validation_interval": 4}
    config = trainer_kit.get_experiment(name).replace(trainer=short)
    gan, logs = launch(config, "train_and_eval", str(tmp_path))
    wanted = {
        "gan_rings": {"modes", "near", "distance"},
        "gan_digits": {"fidelity_distance", "coverage_distance"},
    }

    assert {"discriminator_loss", "generator_loss", *wanted[name]} <= {*logs}
    assert (tmp_path / "best_ckpt" / "info.json").is_file()

    pictures = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert pictures == ["step-00000004.png", "step-00000008.png"]

    picture = tf.io.decode_png((tmp_path / "samples" / pictures[-1]).read_bytes()).numpy()
    assert picture.shape[0] >= 200
    assert picture.std() > 5
    assert gan(np.zeros((3, gan.latent_size), np.float32)).shape[0] == 3
