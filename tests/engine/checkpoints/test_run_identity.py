"""Whose checkpoint it is: what a run removes, refuses, moves away and adopts."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.checkpoints.small_run import SmallRun, names, parts
from trainer_kit.checkpoints.commit import is_foreign, is_saved_by_run, read_commit_record
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.checkpoint_selection import find_newest_checkpoint
from trainer_kit.evals.checkpoint_watcher import CheckpointWatcher
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.sidecar_lease import Lease


def _run(folder: Path, run_id: str = "ours", **arguments: Any) -> SmallRun:
    return SmallRun(folder, run_id=run_id, **arguments)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another run, with the steps 1 and 7."""
    folder = tmp_path_factory.mktemp("other")
    _run(folder, "theirs").train_to(1, 7)
    return folder


def _copy(other: Path, folder: Path, step: int, *left_out: str) -> list[str]:
    copied = [part for part in parts(step) if part not in left_out]
    for part in copied:
        shutil.copy(other / part, folder / part)

    return copied


def test_each_record_holds_the_identity_of_the_run(tmp_path: Path) -> None:
    _run(tmp_path).train_to(1)
    SmallRun(tmp_path).train_to(2)

    assert [
        (read_commit_record(f"{tmp_path}/ckpt-{step}") or {}).get("run_id") for step in (1, 2)
    ] == [
        "ours",
        None,
    ]
    assert [is_saved_by_run(f"{tmp_path}/ckpt-{step}", "ours") for step in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    assert [is_foreign(f"{tmp_path}/ckpt-{step}", "theirs") for step in (1, 2, 3)] == [
        True,
        False,
        False,
    ]
    assert is_saved_by_run(f"{tmp_path}/ckpt-1", "")
    assert not is_foreign(f"{tmp_path}/ckpt-1", "")


@pytest.mark.parametrize("recorded", [True, False])
def test_rotation_neither_counts_nor_removes_foreign_checkpoints(
    other: Path, tmp_path: Path, recorded: bool
) -> None:
    _run(tmp_path, max_to_keep=2).train_to(2, 3)
    foreign = _copy(other, tmp_path, 1, *([] if recorded else parts(1)[:1]))

    _run(tmp_path, max_to_keep=2).train_to(4, 5)

    assert names(tmp_path) == sorted(["checkpoint", *foreign, *parts(4), *parts(5)])
    assert all((tmp_path / part).read_bytes() == (other / part).read_bytes() for part in foreign)


def test_a_run_with_a_newer_foreign_checkpoint_does_not_start(other: Path, tmp_path: Path) -> None:
    _copy(other, tmp_path, 7)
    for older in ([], [2, 3]):
        if older:
            _run(tmp_path / "own").train_to(*older)
            for path in (tmp_path / "own").glob("ckpt-*"):
                shutil.move(path, tmp_path / path.name)
        before = set(names(tmp_path))
        with pytest.raises(
            StorageError, match=r"another run saved .*ckpt-7: .* copy it to a folder of its own"
        ):
            _run(tmp_path)
        assert set(names(tmp_path)) == before

    with pytest.raises(UsageError, match=r"--from_step: another run saved .*ckpt-7"):
        _run(tmp_path, from_step=7)

    assert _run(tmp_path, "").start == 7  # without a manifest it is a folder of copies


def test_a_save_does_not_replace_a_foreign_checkpoint(other: Path, tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.train_to(6)
    _copy(other, tmp_path, 7)

    with pytest.raises(StorageError, match=r"another run saved .*ckpt-7"):
        run.train_to(7)

    assert is_foreign(f"{tmp_path}/ckpt-7", "ours")


def test_a_save_moves_another_programs_checkpoint_away(
    other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _run(tmp_path)
    run.train_to(6)
    copied = _copy(other, tmp_path, 7, *parts(7)[:1])

    run.train_to(7)

    assert names(tmp_path / "archived") == copied
    assert "this run did not save it; it was moved to" in caplog.text
    assert is_saved_by_run(f"{tmp_path}/ckpt-7", "ours")


def test_who_only_reads_passes_over_checkpoints_of_another_run(
    other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _run(tmp_path).train_to(1, 3)
    _copy(other, tmp_path, 7)

    # A folder without a manifest is of any run.
    assert find_newest_checkpoint(str(tmp_path)) == f"{tmp_path}/ckpt-7"

    (tmp_path / "manifest.json").write_text('{"run_id": "ours"}')

    assert find_newest_checkpoint(str(tmp_path)) == f"{tmp_path}/ckpt-3"

    directory = RunDirectory(str(tmp_path), TrainerConfig(), "side")
    ledger = Ledger(directory.ledger_path, dataset="eval", config_hash="a")
    lease = Lease(directory.evals_dir, "side", lambda: ("wait", 0))
    sidecar = Sidecar(directory, ledger, None, None, lease, 20, tf.Variable(0))
    for newest_only, steps in ((False, [1, 3]), (True, [3])):
        arrivals = CheckpointWatcher(str(tmp_path), 0, sidecar, newest_only)
        taken = itertools.islice(arrivals.follow(lambda: False, contextlib.nullcontext), len(steps))
        assert list(taken) == [f"{tmp_path}/ckpt-{step}" for step in steps]

    assert "ckpt-7 was saved by another run" in caplog.text
