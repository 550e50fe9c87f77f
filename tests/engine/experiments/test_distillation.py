"""The experiment `distillation`: its data, and a student that learns from a teacher alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import trainer_kit
from trainer_kit.experiments import distillation
from trainer_kit.experiments.distillation import load_images

SHORT = {"train_steps": 100, "steps_per_loop": 100, "checkpoint_interval": 100}
SHORT |= {"validation_interval": 100}


def test_few_images_hold_out_the_same_ones_as_all() -> None:
    few, _ = load_images(True, 200)
    images, digits = load_images(True)
    held_out, _ = load_images(False, 200)

    assert few.shape == (200, 8, 8, 1)
    assert digits.shape == (1437,)
    assert len(np.unique([*images, *held_out], axis=0)) == 1797


def test_a_student_learns_from_the_teacher_without_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trainer_kit.get_experiment("distillation").replace(trainer=SHORT)
    teacher, _ = trainer_kit.launch(config, "train_and_eval", str(tmp_path / "teacher"))

    images, digits = load_images(True)
    monkeypatch.setattr(distillation, "load_images", lambda *_: (images, np.zeros_like(digits)))
    student = {"teacher": str(tmp_path / "teacher"), "width": 4, "teacher_weight": 1.0}
    config = config.replace(task=student)
    model, logs = trainer_kit.launch(config, "train_and_eval", str(tmp_path / "student"))

    answers = [net.predict(images, verbose=0).argmax(axis=1) for net in (teacher, model)]
    assert (answers[0] == answers[1]).mean() > 0.5
    assert math.isfinite(logs["validation_loss"])
    assert model.count_params() == 666  # the teacher is no part of it
