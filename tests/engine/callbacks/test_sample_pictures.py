"""SamplePictures: which weights and latents a picture is made from, and for which tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.callbacks.callback import Evaluation, Run
from trainer_kit.callbacks.sample_pictures import SamplePictures, image_grid
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.testing import tiny_experiment


class _Model(tf.Module):
    latent_size = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(1.0)


class _Task:
    def __init__(self) -> None:
        self.drawn: list[np.ndarray] = []

    def inference_step(self, latents: tf.Tensor, model: _Model) -> tf.Tensor:
        return latents * model.weight

    def picture(self, samples: np.ndarray) -> np.ndarray:
        self.drawn.append(samples)
        return np.full((4, 5, 3), 200, np.uint8)


class _Trainer:
    def __init__(self) -> None:
        self.task = _Task()
        self.model = _Model()
        self.global_step = tf.Variable(7)

    @contextlib.contextmanager
    def use_weights(self) -> Iterator[None]:
        self.model.weight.assign(2.0)
        yield
        self.model.weight.assign(1.0)


def test_evaluated_weights_draw_from_the_same_latents_each_time(tmp_path: Path) -> None:
    trainer: Any = _Trainer()
    run = Run(trainer, str(tmp_path))
    callback = SamplePictures(count=5)
    callback.run_begin(run)

    for step in (7, 9):
        run.step = step
        run.evaluation = Evaluation(step)
        callback.evaluation_end(run, {})

    tried, first, second = trainer.task.drawn

    assert np.array_equal(tried, first)
    assert first.shape == (5, 3)
    assert np.array_equal(first, second)

    SamplePictures(count=5, seed=1).evaluation_end(run, {})

    assert not np.array_equal(first, trainer.task.drawn[-1])
    np.testing.assert_allclose(first, 2 * tf.random.stateless_normal([5, 3], [0, 0]).numpy())
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "step-00000007.png",
        "step-00000009.png",
    ]

    picture = tf.io.decode_png((tmp_path / "samples" / "step-00000009.png").read_bytes())
    assert picture.shape == (4, 5, 3)
    assert int(picture[0, 0, 0]) == 200


def test_an_evaluation_of_an_earlier_start_is_not_drawn_again(tmp_path: Path) -> None:
    trainer: Any = _Trainer()
    run = Run(trainer, str(tmp_path))
    run.evaluation = Evaluation(7, is_replayed=True)

    SamplePictures().evaluation_end(run, {})

    assert trainer.task.drawn == []


@pytest.mark.parametrize(
    "picture",
    [None, np.zeros((4, 5, 3)), np.zeros((4, 5), np.uint8), "no method"],
    ids=["none", "no uint8", "no channels", "no method"],
)
def test_what_is_no_picture_is_refused_before_the_first_step(picture: Any, tmp_path: Path) -> None:
    trainer: Any = _Trainer()
    trainer.task = SimpleNamespace(
        inference_step=trainer.task.inference_step, picture=lambda samples: picture
    )
    if isinstance(picture, str):  # the examples are no images
        del trainer.task.picture

    with pytest.raises(UsageError):
        SamplePictures().run_begin(Run(trainer, str(tmp_path)))

    assert not (tmp_path / "samples").exists()


def test_a_grid_shows_images_row_by_row() -> None:
    images = np.stack([np.full((16, 20, 1), value, np.float32) for value in (-1.0, 0.0, 1.0)])
    grid = image_grid(images)

    assert grid.shape == (2 * 32 + 2, 2 * 40 + 2, 1)
    assert grid.dtype == np.uint8
    assert grid[31, 39, 0] == 0
    assert grid[0, 42, 0] == 128
    assert grid[34, 0, 0] == 255
    assert grid[32, 0, 0] == 0


def test_a_task_that_cannot_draw_is_refused_before_a_step(tmp_path: Path) -> None:
    config = tiny_experiment().replace(trainer={"callbacks": [{"name": "sample_pictures"}]})
    with pytest.raises(UsageError, match=r"the model of TinyTask has no latent_size.*GanTask"):
        launch(config, "train_and_eval", str(tmp_path))
