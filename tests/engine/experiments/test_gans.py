"""The experiments `gan_rings` and `gan_digits`: data, measures, a short run of each, an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from trainer_kit.errors import UsageError
from trainer_kit.experiments.gan_digits.task import (
    CoverageDistance,
    FidelityDistance,
    load_digit_images,
)
from trainer_kit.experiments.gan_rings.task import (
    CoveredCenters,
    EnergyDistance,
    NearShare,
    sample_ring_points,
)
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


@dataclass(frozen=True)
class FinishedRun:
    """A short run: its folder, its model and the logs of its last evaluation."""

    folder: Path
    gan: Any
    logs: dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    """A run of each experiment."""
    short = {"train_steps": 8, "steps_per_loop": 4, "summary_interval": 4, "validation_interval": 4}
    runs = {}
    for name in ("gan_rings", "gan_digits"):
        folder = tmp_path_factory.mktemp("runs") / name
        config = trainer_kit.get_experiment(name).replace(trainer=short)
        gan, logs = launch(config, "train_and_eval", str(folder), experiment=name)
        runs[name] = FinishedRun(folder, gan, logs)
    return runs


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("gan_rings", {"modes", "near", "distance"}),
        ("gan_digits", {"fidelity_distance", "coverage_distance"}),
    ],
)
def test_a_short_run_reports_draws_and_keeps_its_best(
    runs: dict[str, FinishedRun], name: str, metrics: set[str]
) -> None:
    run = runs[name]

    assert {"discriminator_loss", "generator_loss", *metrics} <= run.logs.keys()
    assert (run.folder / "best_ckpt" / "info.json").is_file()

    pictures = sorted(path.name for path in (run.folder / "samples").iterdir())
    assert pictures == ["step-00000004.png", "step-00000008.png"]

    picture = tf.io.decode_png((run.folder / "samples" / pictures[-1]).read_bytes()).numpy()
    assert picture.shape[0] >= 200
    assert picture.std() > 5
    latents = np.zeros((3, run.gan.latent_size), np.float32)
    assert run.gan(latents).shape[0] == 3


def test_the_export_of_a_gan_generates_from_latents(
    runs: dict[str, FinishedRun], tmp_path: Path
) -> None:
    folder = runs["gan_rings"].folder

    exported = trainer_kit.export(folder, tmp_path / "model")

    gan = trainer_kit.load_model(folder)
    latents = np.random.default_rng(0).normal(size=(5, gan.latent_size)).astype("float32")
    model = tf.saved_model.load(exported.path)
    outputs = model.signatures["serving_default"](latents=tf.constant(latents))
    expected = gan.generator(latents, training=False)
    np.testing.assert_allclose(outputs["outputs"], expected, rtol=1e-6)
    predictions = trainer_kit.predict(folder, latents)
    np.testing.assert_allclose(predictions["outputs"], expected, rtol=1e-6)


def test_a_prediction_of_a_gan_needs_latents(runs: dict[str, FinishedRun]) -> None:
    with pytest.raises(UsageError, match=r"does not take .* with name 'latents' .* is incom"):
        trainer_kit.predict(runs["gan_rings"].folder)
