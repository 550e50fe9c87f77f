"""Training runs the job of a component, and goes on where an earlier start has ended."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import read_json, replicas
from trainer_kit.compat.pipelines import Training

X = np.random.RandomState(0).normal(size=(40, 4)).astype("float32")


def build_batches(x: Any = X) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, X[:, :1])).batch(10)


def build_model() -> Any:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def create_job(folder: Path, kind: type[Training] = Training, **options: Any) -> Training:
    tf.random.set_seed(1)
    return kind(build_model, folder / "job", folder / "artifacts", **{"use_tpu": False, **options})


def load_outputs(folder: Path) -> np.ndarray:
    """Returns the outputs of the SavedModel of a job."""
    model = tf.saved_model.load(str(folder / "artifacts" / "saved_model"))
    return model.serve(X).numpy()


def test_a_job_without_a_tpu_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        job = create_job(tmp_path, use_tpu=True)

    (message,) = (message for message in caplog.messages if "TPU" in message)
    text = "use_tpu=True: there is no TPU; the job trains with TensorFlow's default strategy"
    assert message == text
    assert job.distribute_strategy is tf.distribute.get_strategy()


def test_a_job_trains_in_the_scope_of_its_strategy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = replicas(2)
    with strategy.scope():
        job = create_job(tmp_path, use_tpu=True)

    assert job.distribute_strategy is strategy
    assert "TPU" not in caplog.text

    job.run_train(build_batches(), None, 1)
    np.testing.assert_allclose(load_outputs(tmp_path), job.model(X), atol=1e-6)


def test_a_loss_that_is_not_finite_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = create_job(tmp_path)
    job.add_callback(keras.callbacks.TerminateOnNaN())

    with pytest.raises(SystemExit) as exit_info:
        job.run_train(build_batches(X * np.nan), build_batches(), 1)

    assert exit_info.value.code == 3
    assert "training_loss is nan at step 1" in capsys.readouterr().err
    assert not (tmp_path / "artifacts").exists()
    assert job.last_checkpoint is None


@dataclass(frozen=True)
class FinishedJob:
    """A job of two epochs that was started for each.

    Attributes:
      folder: The folder of the job and its artifacts.
      first_outputs: The outputs of the SavedModel after the first epoch.
      progress: `last_epoch` and `last_checkpoint` at the begin of the second start.
      job: The job of the second start.
    """

    folder: Path
    first_outputs: np.ndarray
    progress: tuple[int, str | None]
    job: Training


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """A finished job; tests leave its files alone."""
    folder = tmp_path_factory.mktemp("finished")
    create_job(folder).run_train(build_batches(), build_batches(), 1)
    first_outputs = load_outputs(folder)

    job = create_job(folder)
    progress = job.last_epoch, job.last_checkpoint
    job.run_train(build_batches(), build_batches(), 2)
    return FinishedJob(folder, first_outputs, progress, job)


def test_a_job_goes_on_where_it_has_ended(finished: FinishedJob) -> None:
    folder = finished.folder
    job = finished.job

    assert finished.progress == (1, str(folder / "job" / "checkpoints" / "ckpt-4"))
    assert job.history is not None
    assert job.history.epoch == [0, 1]
    assert job.last_epoch == 2
    np.testing.assert_allclose(load_outputs(folder), job.model(X), atol=1e-6)
    assert not np.allclose(load_outputs(folder), finished.first_outputs)
    meta = read_json(folder / "job" / "job_meta.json")
    assert meta["last_epoch"] == 2
    assert meta["last_checkpoint"] == "checkpoints/ckpt-8"


def test_a_finished_job_leaves_its_artifacts_alone(finished: FinishedJob) -> None:
    artifacts = finished.folder / "artifacts"
    before = {path: path.stat().st_mtime_ns for path in artifacts.rglob("*")}

    again = create_job(finished.folder).run_train(build_batches(), build_batches(), 2)

    assert finished.job.history is not None
    assert again.history == finished.job.history.history
    assert {path: path.stat().st_mtime_ns for path in artifacts.rglob("*")} == before


@pytest.mark.parametrize("lost", [None, "ckpt-8.index", "history.json"])
def test_a_finished_job_writes_artifacts_and_trains_what_is_lost(
    lost: str | None, finished: FinishedJob, tmp_path: Path
) -> None:
    # Without the artifacts, as if the process had been killed before it wrote them.
    shutil.copytree(finished.folder / "job", tmp_path / "job")
    if lost is not None:
        (tmp_path / "job" / "checkpoints" / lost).unlink()

    history = create_job(tmp_path).run_train(build_batches(), build_batches(), 2).history

    assert finished.job.history is not None
    assert history == finished.job.history.history
    assert (tmp_path / "artifacts" / "history.csv").read_text().count("\n") == 3
    np.testing.assert_array_equal(load_outputs(tmp_path), load_outputs(finished.folder))


def test_a_subclass_may_replace_init_and_run_train(tmp_path: Path) -> None:
    class Scaled(Training):
        def __init__(self, *arguments: Any, factor: float, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.factor = factor

        def run_train(self, train_ds: Any, valid_ds: Any, epochs: int) -> Any:
            return super().run_train(
                train_ds.map(lambda x, y: (self.factor * x, y)), valid_ds, epochs
            )

    job = create_job(tmp_path, Scaled, factor=0.0)
    kernel, bias = job.model.get_weights()
    job.run_train(build_batches(), None, 1)

    # Inputs of 0 have no gradient.
    trained_kernel, trained_bias = job.model.get_weights()
    np.testing.assert_array_equal(trained_kernel, kernel)
    assert trained_bias != bias


def test_a_loop_of_a_subclass_saves_its_own_artifacts(tmp_path: Path) -> None:
    class Loop(Training):
        def run_train(self, train_ds: Any, valid_ds: Any, epochs: int) -> Any:
            losses = {"loss": [1.0 for _ in range(self.last_epoch, epochs)]}
            self.save_history(losses)
            self.save_model()
            return losses

    job = create_job(tmp_path, Loop)
    job.run_train(None, None, 2)
    assert (tmp_path / "artifacts" / "history.csv").read_text() == ",loss\n0,1.0\n1,1.0\n"
    np.testing.assert_allclose(load_outputs(tmp_path), job.model(X), atol=1e-6)


def test_a_job_without_folders_writes_no_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Training(build_model, use_tpu=False)
    try:
        job.run_train(build_batches(), None, 1)
        assert job.last_epoch == 1
    finally:
        shutil.rmtree(job.job_dir)

    assert list(tmp_path.iterdir()) == []
    assert f"job_dir is not given: the files are in {job.job_dir}" in caplog.text
    with pytest.raises(ValueError, match="save_model: artifacts_dir is not given"):
        job.save_model()


REFUSALS: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "a file in place of a folder": (
        lambda path: Training(build_model, path / "job", path / "a file", use_tpu=False),
        6,
        "a file is a file, not a folder",
    ),
    "a remote job_dir": (
        lambda path: Training(build_model, "gs://bucket/digits", use_tpu=False),
        2,
        "job_dir='gs://bucket/digits' is a remote folder; ",
    ),
    "a remote artifacts_dir": (
        lambda path: Training(build_model, artifacts_dir="gs://bucket/digits", use_tpu=False),
        2,
        "artifacts_dir='gs://bucket/digits' is a remote folder; ",
    ),
    "no data": (lambda path: create_job(path).run_train(None, None, 1), 2, "train_ds is None"),
    "epochs": (
        lambda path: create_job(path).run_train(build_batches(), None, "2"),
        2,
        "epochs='2' is not a whole number",
    ),
    "a TPU that does not answer": (
        lambda path: create_job(path, use_tpu=True),
        2,
        "tpu (TPU_NAME) failed",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_mistake_is_one_line_and_an_exit_code(
    refusal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TPU_NAME", "grpc://127.0.0.1:1")
    act, code, message = REFUSALS[refusal]

    with pytest.raises(SystemExit) as exit_info:
        act(tmp_path)

    assert exit_info.value.code == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
