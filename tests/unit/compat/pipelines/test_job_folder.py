"""The folder of a job tells how far the job has come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer_kit.compat.pipelines.job_folder import JobFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job whose epochs have 10 steps, with complete checkpoints of the steps 10 and 25."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "params.yaml").write_text("trainer:\n  steps_per_epoch: 10\n")
    for step in (10, 25):
        (checkpoints / f"ckpt-{step}.index").touch()
        (checkpoints / f"ckpt-{step}.commit.json").touch()

    return tmp_path


def test_a_new_job_has_no_epoch_and_no_checkpoint(tmp_path: Path) -> None:
    job = JobFolder(str(tmp_path / "new"))

    assert job.last_epoch() == 0
    assert job.last_checkpoint() is None
    assert job.read_meta() == {}
    assert list(tmp_path.iterdir()) == []


def test_last_epoch_counts_complete_epochs_only(folder: Path) -> None:
    job = JobFolder(str(folder))

    assert job.last_epoch() == 2
    assert job.last_checkpoint() == str(folder / "checkpoints" / "ckpt-25")


def test_a_checkpoint_without_its_record_does_not_count(folder: Path) -> None:
    (folder / "checkpoints" / "ckpt-30.index").touch()
    assert JobFolder(str(folder)).last_epoch() == 2


def test_steps_are_compared_as_numbers(folder: Path) -> None:
    (folder / "checkpoints" / "ckpt-100.commit.json").touch()
    assert JobFolder(str(folder)).last_epoch() == 10


def test_a_job_without_steps_per_epoch_has_no_epochs(folder: Path) -> None:
    (folder / "checkpoints" / "params.yaml").unlink()
    assert JobFolder(str(folder)).last_epoch() == 0


def test_job_meta_is_written_only_when_it_changes(folder: Path) -> None:
    job = JobFolder(str(folder))
    job.update_meta(last_epoch=2)
    before = (folder / "job_meta.json").stat()

    job.update_meta(last_epoch=2)

    assert (folder / "job_meta.json").stat() == before

    job.update_meta(other=1)

    assert json.loads((folder / "job_meta.json").read_text()) == {"last_epoch": 2, "other": 1}


def test_a_damaged_job_meta_is_written_again(folder: Path) -> None:
    (folder / "job_meta.json").write_text('{"last_epoch')
    job = JobFolder(str(folder))

    job.update_meta(last_epoch=2)

    assert job.read_meta() == {"last_epoch": 2}
