"""`trainer-kit doctor data`: what it prints of the training data, and what it refuses."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask
from trainer_kit.cli.doctor import doctor_data
from trainer_kit.cli.main import main
from trainer_kit.config.experiment_registry import register_experiment, register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import ExitCode
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.testing import TinyConfig, tiny_experiment

_EXAMPLES = 40
Output = pytest.CaptureFixture[str]


@configclass
class _ImageConfig(TinyConfig):
    """Images, by a Source or by a plain dataset.

    Attributes:
      has_nan: Whether one pixel is NaN.
      is_plain: Whether the data is a tf.data.Dataset.
    """

    has_nan: bool = False
    is_plain: bool = False


def augment(batch: Any) -> Any:
    """Takes 30 ms."""
    images, labels = batch

    def wait(values: np.ndarray) -> np.ndarray:
        time.sleep(0.03)
        return values

    slow_images = tf.numpy_function(wait, [images], tf.float32)
    return tf.ensure_shape(slow_images, images.shape), labels


@register_task(_ImageConfig)
class _ImageTask(LinearTask):
    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        images = np.linspace(0, 1, _EXAMPLES * 75, dtype=np.float32).reshape([-1, 5, 5, 3])
        labels = np.arange(_EXAMPLES, dtype=np.int32) % 3
        if self.task_config.has_nan:
            images[29, 2, 2, 1] = np.nan
        if self.task_config.is_plain:
            return tf.data.Dataset.from_tensor_slices((images, labels)).batch(8).repeat()
        return ArraySource((images, labels), params, transform=augment)


@register_experiment("tests_doctor_data")
def _images() -> Any:
    return tiny_experiment().replace(task=_ImageConfig())


@register_experiment("tests_doctor_data_tiny")
def _tiny() -> Any:
    return tiny_experiment()


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of a second is ten batches of the slow stage."""
    monkeypatch.setattr(doctor_data, "_SECONDS", 0.3)


def test_the_slow_stage_and_the_values_are_printed(
    here: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)

    code = main(["doctor", "data", "tests_doctor_data", "--batches=5", "--picture=sample.png"])

    out = capsys.readouterr().out
    assert code == ExitCode.DONE
    assert re.search(
        r"^without a model: \d+ examples/s, a batch of 8 every [\d.]+ ms$", out, re.MULTILINE
    )
    stages = re.findall(r"^ +([\d.]+)  (.*)$", out, re.MULTILINE)
    gather, transform = stages
    assert float(transform[0]) > 20 > float(gather[0])
    assert transform[1].startswith("transform augment (test_doctor_data.py:")
    assert re.search(r"^ +batch/0: float32 \(8, 5, 5, 3\), from 0 to 1$", out, re.MULTILINE)
    assert re.search(r"^ +batch/1: int32 \(8,\), from 0 to 2$", out, re.MULTILINE)
    assert (here / "sample.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in here.iterdir()} == {"mine.py", "sample.png"}


def test_the_place_of_a_nan_is_named(capsys: Output) -> None:
    setting = "--params_override=task.has_nan=true"

    code = main(["doctor", "data", "tests_doctor_data", "--batches=5", setting])

    assert code == ExitCode.DATA
    message = capsys.readouterr().err
    assert "batch/0 has a value that is NaN or infinite in row" in message


def test_a_plain_dataset_has_a_hint_instead_of_stages(capsys: Output) -> None:
    setting = "--params_override=task.is_plain=true,task.has_nan=true"

    code = main(["doctor", "data", "tests_doctor_data", "--batches=5", setting])

    out, err = capsys.readouterr()
    assert code == ExitCode.DATA
    assert "return a Source, such as TFRecordSource, from build_inputs" in out
    assert "infinite in row 5 of batch 3" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests_doctor_data", "--batches=0"], "--batches=0: give a number of at least 1"),
        (["tests_doctor_data", "--picture=a.jpg"], "--picture=a.jpg: give a name that ends with"),
        (["tests_doctor_data_tiny", "--batches=1", "--picture=a.png"], "no tensor of the batch"),
    ],
)
def test_an_examination_that_cannot_be_made_is_refused(
    arguments: list[str],
    message: str,
    capsys: Output,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["doctor", "data", *arguments]) == ExitCode.USAGE
    assert message in capsys.readouterr().err
