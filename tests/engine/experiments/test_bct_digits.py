"""The experiment `bct_digits`: its losses, the cross-test, and a new model against an old one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from trainer_kit.experiments.bct_digits.task import compute_retrieval, masked_cross_entropy
from trainer_kit.run.launcher import launch

SHORT = {"train_steps": 60, "steps_per_loop": 60, "summary_interval": 60, "validation_interval": 60}
SHORT |= {"checkpoint_interval": 60, "best_checkpoint_eval_metric": ""}
NEW = {"net": {"width": 12, "digits": tuple(range(10))}}


def test_digits_that_a_classifier_lacks_have_no_gradient() -> None:
    logits = tf.Variable([[0.0, math.log(3.0)], [5.0, -1.0]])

    with tf.GradientTape() as tape:
        loss = masked_cross_entropy(tf.constant([7, 9]), (4, 7), logits)

    assert float(loss) == pytest.approx(-math.log(0.75) / 2)  # of the first example, over both
    np.testing.assert_allclose(tape.gradient(loss, logits), [[0.125, -0.125], [0, 0]], atol=1e-6)


def test_retrieval_leaves_out_the_query_itself() -> None:
    points = np.array([[1, 0], [2, 0.1], [0, 1], [0.1, 3]], np.float32)

    assert compute_retrieval(points, points, np.array([0, 0, 1, 1])) == 1
    assert compute_retrieval(points, points, np.array([0, 1, 2, 3])) == 0
    assert compute_retrieval(points, -points, np.array([0, 0, 1, 1])) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Short runs of the old model, and of the new one with and without the influence loss."""
    base = tmp_path_factory.mktemp("runs")
    runs = {}
    for name, weight in {"old": None, "new": 1.0, "alone": 0.0}.items():
        config = trainer_kit.get_experiment("bct_digits").replace(trainer=SHORT)
        if weight is not None:
            config = config.replace(
                task={**NEW, "old_model": {"run": str(base / "old"), "influence_weight": weight}}
            )
        runs[name] = launch(config, "train_and_eval", str(base / name))

    return {"folder": base, **runs}


def test_only_the_influence_loss_makes_old_galleries_usable(runs: dict[str, Any]) -> None:
    _, old = runs["old"]
    (_, new) = runs["new"]
    (_, alone) = runs["alone"]

    assert new["old_retrieval"] == alone["old_retrieval"] == old["retrieval"] > 0.9
    assert new["retrieval"] > 0.9
    assert alone["retrieval"] > 0.9
    assert new["cross_retrieval"] > 0.8 > 0.5 > alone["cross_retrieval"]


def test_the_old_model_keeps_its_weights(runs: dict[str, Any]) -> None:
    old = runs["old"][0]
    new = runs["new"][0]
    for name in ("encoder", "classifier"):
        kept = new.get_layer(f"old_{name}")
        original = old.get_layer(name)
        assert not kept.trainable_variables
        assert [weight.tobytes() for weight in kept.get_weights()] == [
            weight.tobytes() for weight in original.get_weights()
        ]
