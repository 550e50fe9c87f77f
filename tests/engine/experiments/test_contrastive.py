"""The experiment `contrastive`: its views, its loss, and a few real steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from trainer_kit.experiments.contrastive import compute_nt_xent, contrastive, distort, load_images

SHORT = {"train_steps": 40, "steps_per_loop": 20, "validation_interval": 40}


def test_a_few_steps_already_gather_images_of_a_digit(tmp_path: Path) -> None:
    config = contrastive().replace(trainer=SHORT, task={"train_data": {"global_batch_size": 64}})
    model, logs = trainer_kit.launch(config, "train_and_eval", str(tmp_path))

    assert logs["precision_at_10"] > 0.8  # an untrained net has about 0.72
    assert 0.9 < logs["neighbour_accuracy"] <= 1

    _, (images, labels) = load_images()
    assert model(images)["embedding"].shape == (360, 64)
    assert labels.shape == (360,)


def test_the_partner_of_a_view_is_half_a_batch_away() -> None:
    views = tf.constant([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 4.0]])

    # Similarities to the others: 1 with the partner, 0 with the two negatives.
    assert float(compute_nt_xent(views, 1.0)) == pytest.approx(math.log(math.e + 2) - 1)


def test_distortions_move_images_around_their_centre() -> None:
    (images, *_) = load_images()
    same, moved, shrunk = np.zeros([3, 4, 6], np.float32)
    moved[:, 4] = 0.25
    shrunk[:, [0, 3]] = 0.5

    np.testing.assert_allclose(distort(images[:4], same), images[:4], atol=1e-6)
    np.testing.assert_allclose(distort(images[:4], moved)[:, :, :-1], images[:4, :, 1:], atol=1e-6)
    np.testing.assert_allclose(
        distort(images[:4, ::-1, ::-1], shrunk),
        distort(images[:4], shrunk)[:, ::-1, ::-1],
        atol=1e-5,
    )
