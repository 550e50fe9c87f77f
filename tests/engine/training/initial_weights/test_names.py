"""The numbers that a user gave to layers decide which weights of a run go where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import trainer_kit as tk
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.checkpoints.weight_files.compare import common_names
from trainer_kit.checkpoints.weight_files.open_file import open_weights
from trainer_kit.config.schema.initial_weights import InitCheckpointConfig
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.testing import TinyConfig, tiny_arrays
from trainer_kit.training.initial_weights.weight_loading import load_initial_weights

WIDTH = tiny_arrays(True)[0].shape[1]


@tk.configclass
class _StagesConfig(TinyConfig):
    first: int = 2


def _build_stages(first: int) -> keras.Model:
    """A model with two stages that have numbers, and a head that Keras numbers."""
    stages = [keras.layers.Dense(WIDTH, name=f"stage_{number}") for number in (first, first + 1)]
    return keras.Sequential([keras.Input((WIDTH,)), *stages, keras.layers.Dense(3)])


@tk.register_task(_StagesConfig)
class _StagesTask(LinearTask):
    def build_model(self) -> keras.Model:
        return _build_stages(self.task_config.first)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of stage_2 and stage_3."""
    folder = tmp_path_factory.mktemp("stages") / "run"
    experiment = linear_experiment(train_steps=10, best_checkpoint_eval_metric="accuracy")
    launch(experiment.replace(task=_StagesConfig()), "train_and_eval", str(folder))

    return folder


def _read_stage_two(run: Path) -> np.ndarray:
    model = _build_stages(2)
    tk.load_weights(model, run / "ckpt-10")  # the head has another number than in the run
    return np.asarray(model.get_layer("stage_2").kernel)


@pytest.mark.parametrize("place", ["ckpt-10", "best_ckpt"])
def test_a_layer_takes_the_weights_of_its_own_number(run: Path, place: str) -> None:
    model = _build_stages(1)
    config = InitCheckpointConfig(path=str(run / place), exclude=("^sequential[^/]*/stage_1/",))

    (report,) = load_initial_weights(model, [config])

    assert np.array_equal(model.get_layer("stage_2").kernel, _read_stage_two(run))
    assert "model/sequential/stage_3/kernel" in report
    assert "by the order of layers" not in report

    rename = {"stage_2/": "stage_1/", "stage_3/": "stage_2/"}

    load_initial_weights(model, [InitCheckpointConfig(path=str(run / place), rename=rename)])

    assert np.array_equal(model.get_layer("stage_1").kernel, _read_stage_two(run))


def test_a_number_that_the_run_lacks_is_an_error(run: Path) -> None:
    for load in (load_initial_weights, tk.load_weights):
        with pytest.raises(UsageError, match=r"stage_1\n +bias +missing in the"):
            load(_build_stages(1), str(run / "ckpt-10"))


def test_runs_are_compared_by_these_numbers(run: Path, tmp_path: Path) -> None:
    launch(
        linear_experiment(train_steps=5).replace(task=_StagesConfig(first=1)),
        "train",
        str(tmp_path),
    )
    ours, theirs = common_names(
        open_weights(str(run / "ckpt-10")), open_weights(str(tmp_path / "ckpt-5"))
    )
    kernels = {
        name
        for name in ours.keys() & theirs.keys()
        if name.startswith("model/") and name.endswith("kernel")
    }

    assert kernels == {"model/sequential/stage_2/kernel", "model/sequential/dense/kernel"}


def test_runs_of_earlier_versions_go_by_the_order(run: Path, tmp_path: Path) -> None:
    old = shutil.copytree(run, tmp_path / "old")
    manifest = json.loads((old / "manifest.json").read_text())

    assert manifest.pop("layer_names")["sequential/stage/kernel"] == "sequential/stage_2/kernel"

    (old / "manifest.json").write_text(json.dumps(manifest))
    model = _build_stages(1)

    (report,) = load_initial_weights(model, str(old / "ckpt-10"))

    assert np.array_equal(model.get_layer("stage_1").kernel, _read_stage_two(run))
    assert "by the order of layers" in report
