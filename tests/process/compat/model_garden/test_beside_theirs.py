"""Theirs beside ours in one process: the same seed and the same data give the same losses and the
same metrics. Theirs runs eagerly, which gives the same numbers without a trace.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import tensorflow as tf
import tf_keras
from official.core import task_factory, train_lib

from tests.engine.compat.model_garden.garden_task import eagerly
from tests.engine.compat.model_garden.tiny import image_classifier, sentence_prediction
from tests.engine.compat.model_garden.tiny.curves import read_curves
from trainer_kit.compat import model_garden

EXPERIMENTS = {"resnet": image_classifier, "bert": sentence_prediction}
SHORT = {
    "train_steps": 10,
    "steps_per_loop": 2,  # a loop ends early where an evaluation is due
    "summary_interval": 2,
    "checkpoint_interval": 5,
    "validation_interval": 5,
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_model_garden_experiment_has_the_same_curves_here(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    experiment.write(tmp_path / "data")

    curves = []
    for framework in (train_lib, model_garden):
        folder = tmp_path / framework.__name__
        tf_keras.backend.clear_session()
        tf_keras.backend.experimental.enable_tf_random_generator()
        tf_keras.utils.set_random_seed(1)
        config = experiment.config(tmp_path / "data")
        config.override({"trainer": SHORT})
        with eagerly() if framework is train_lib else contextlib.nullcontext():
            task = task_factory.get_task(config.task, logging_dir=str(folder))
            framework.run_experiment(
                tf.distribute.get_strategy(), task, "train_and_eval", config, str(folder)
            )
        curves.append(read_curves(folder))

    theirs, ours = curves
    assert {5, 10} == set(theirs["validation"]) < set(theirs["train"])
    for part, steps in theirs.items():
        for step, values in steps.items():
            if name == "bert":  # theirs counts a last batch that is not full like any other
                values.pop("validation_loss", None)
            our_values = {metric: ours[part][step].get(metric) for metric in values}
            assert our_values == pytest.approx(values, rel=1e-5, abs=1e-5), (part, step)
