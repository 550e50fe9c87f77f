"""The experiment `vae`: a few real steps, where it draws, and its parts of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trainer_kit
from trainer_kit.experiments.vae import load_images, vae

SHORT = {"train_steps": 20, "steps_per_loop": 10, "validation_interval": 20}


def test_latents_are_drawn_in_training_only(tmp_path: Path) -> None:
    model, logs = trainer_kit.launch(vae().replace(trainer=SHORT), "train_and_eval", str(tmp_path))

    assert logs["validation_loss"] == pytest.approx(logs["reconstruction"] + logs["kl"])
    assert logs["kl"] > 0
    assert logs["squared_error"] < 0.17  # grey images have 0.18

    _, held_out = load_images()
    images = held_out[:4]
    mean, _ = model.get_layer("encoder")(images)
    decoded = model.get_layer("decoder")(mean)
    np.testing.assert_allclose(model(images)["logits"], decoded, rtol=1e-5, atol=1e-5)

    drawn, drawn_again = (np.asarray(model(images, training=True)["logits"]) for _ in range(2))
    assert np.abs(drawn - decoded).max() > 1e-3
    assert np.abs(drawn - drawn_again).max() > 1e-3
