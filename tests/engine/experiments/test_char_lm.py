"""The experiment `char_lm`: its text, its model, and a few real steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from trainer_kit import DataError
from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.errors import ConfigError
from trainer_kit.experiments.char_lm import CharLmConfig, char_lm
from trainer_kit.experiments.char_lm.config import CharLmModelConfig
from trainer_kit.experiments.char_lm.model import build_transformer
from trainer_kit.experiments.char_lm.task import CharLmTask, split_targets
from trainer_kit.experiments.char_lm.text import (
    VOCABULARY,
    cut_windows,
    is_held_out,
    list_source_files,
    read_text,
)
from trainer_kit.run.launcher import launch

SMALL = CharLmModelConfig(context=12, layers=2, width=16, heads=2)


def _write_library(folder: Path, files: int = 60) -> Path:
    """Makes a small library whose files differ, with what has to be left out beside it."""
    for i in range(files):
        (folder / f"module_{i}.py").write_text(f"value_{i} = {i}\n" * 20)
    for left_out in (
        "test/test_a.py",
        "site-packages/b.py",
        "encodings/cp1.py",
        "_sysconfigdata_linux.py",
        "c.txt",
    ):
        (folder / left_out).parent.mkdir(exist_ok=True)
        (folder / left_out).write_text("left out")

    return folder


def test_tests_generated_files_and_packages_are_left_out(tmp_path: Path) -> None:
    (_write_library(tmp_path, 3) / "sub").mkdir()
    (tmp_path / "sub/inside.py").write_text("a = 1\n")

    assert list_source_files(tmp_path) == [
        "module_0.py",
        "module_1.py",
        "module_2.py",
        "sub/inside.py",
    ]


def test_no_held_out_file_is_in_the_training_text(tmp_path: Path) -> None:
    folder = _write_library(tmp_path)
    sides = {held_out: read_text(folder, held_out).tobytes().decode() for held_out in (True, False)}

    for i in range(60):
        text = (folder / f"module_{i}.py").read_text()
        held_out = is_held_out(f"module_{i}.py")
        assert text in sides[held_out]
        assert f"\nvalue_{i} = " not in sides[not held_out]

    assert len(sides[True]) + len(sides[False]) == sum(
        len(path.read_text()) for path in folder.glob("module_*.py")
    )


def test_texts_and_models_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):  # no source file
        read_text(tmp_path, held_out=False)

    (tmp_path / next(f"m{i}.py" for i in range(100) if not is_held_out(f"m{i}.py"))).write_text(
        "a = 1\n"
    )

    with pytest.raises(DataError):  # nothing to evaluate
        read_text(tmp_path, held_out=True)

    with pytest.raises(DataError):
        cut_windows(np.zeros(5, np.uint8), 5)

    with pytest.raises(ConfigError):
        char_lm(heads=3)


def test_windows_predict_every_character_but_the_first_once() -> None:
    text = np.arange(26, dtype=np.uint8)
    windows = cut_windows(text, 5)

    assert windows.dtype == np.uint8
    assert windows.tolist() == [list(range(i, i + 6)) for i in (0, 5, 10, 15, 20)]

    characters, following = split_targets(tf.constant(windows))
    assert characters.dtype == following.dtype == tf.int32
    assert following.numpy().ravel().tolist() == list(range(1, 26))


def test_a_changed_character_changes_no_earlier_logits() -> None:
    model = build_transformer(SMALL, VOCABULARY)
    characters = np.random.default_rng(0).integers(0, VOCABULARY, (2, 12)).astype(np.int32)
    before = model(characters)
    for position in (0, 3, 11):
        changed = characters.copy()
        changed[:, position] = (changed[:, position] + 1) % VOCABULARY
        difference = np.abs(before - model(changed)).max(axis=(0, 2))
        assert (difference[:position] == 0).all()
        # And every later one changes: the attention reaches to the start.
        assert (difference[position:] > 0).all()


def test_the_model_has_the_parameters_of_its_layers() -> None:
    assert lookup_task_class(CharLmConfig()) is CharLmTask
    assert CharLmTask(char_lm().task).build_model().count_params() == 511_104


def test_the_metric_is_the_mean_over_all_characters() -> None:
    (metric,) = CharLmTask(char_lm().task).build_metrics(training=False)
    labels = np.zeros((4, 2), np.int32)
    certain = 100 * np.eye(VOCABULARY, dtype=np.float32)[labels]

    metric.update_state(labels[:3], certain[:3])
    metric.update_state(labels[:1], np.zeros_like(certain[:1]))

    assert float(metric.result()) == pytest.approx(7 / 4, abs=1e-4)


def test_a_few_steps_already_learn(tmp_path: Path) -> None:
    task = {
        "folder": str(_write_library(tmp_path)),
        "evaluated_windows": 8,
        "model": {"context": 16, "width": 32, "layers": 1},
        "validation_data": {"global_batch_size": 3},
    }
    steps = {
        "train_steps": 60,
        "steps_per_loop": 20,
        "summary_interval": 20,
        "validation_interval": 20,
    }
    config = trainer_kit.get_experiment("char_lm").replace(task=task, trainer=steps)

    _, logs = launch(config, "train_and_eval", str(tmp_path / "run"))

    assert logs["bits_per_character"] < 3  # by chance: 7
    assert logs["bits_per_character"] == pytest.approx(
        logs["validation_loss"] / math.log(2), rel=1e-4
    )
