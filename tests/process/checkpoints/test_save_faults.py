"""Saves that fail: the process is killed at any write point, or the disk is full at any file."""

from __future__ import annotations

import logging
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.checkpoints.small_run import RUN_ID, SmallRun, names, parts, save_and_die
from tests.fork_server import ForkServer
from trainer_kit import files
from trainer_kit.checkpoints import manager
from trainer_kit.checkpoints.commit import describe_damage
from trainer_kit.errors import ExitCode, StorageError
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.testing import stop_at

# Half of a checkpoint of somebody else, and another file.
FOREIGN = ("ckpt-1.data-00000-of-00001", "notes.txt")
PAGE = 4096  # bytes, the unit in which a tmpfs fills
REMOVED = [
    "commit.json",
    "index",
    "iterator.index",
    "data-00000-of-00001",
    "iterator.data-00000-of-00001",
]


# Write point, the how-manyth time, whether the save is asynchronous, and the step that the next
# start goes on from.
KILLS = [
    ("checkpoint.save", 1, True, 3),
    ("checkpoint.begin", 1, True, 3),
    ("checkpoint.written", 1, True, 3),
    ("checkpoint.written", 1, False, 3),
    ("checkpoint.record.open", 1, True, 3),
    ("checkpoint.record.rename", 1, True, 3),
    *(("checkpoint.move", occurrence, True, 4) for occurrence in (1, 2, 3, 4, 5)),
    ("checkpoint.pointer", 1, True, 4),
    ("checkpoint.begin", 2, True, 4),
    ("checkpoint.remove", 1, True, 4),
    ("checkpoint.remove", 2, True, 4),
    ("checkpoint.remove", 3, False, 4),
    ("checkpoint.remove", 4, True, 4),
]


@pytest.fixture(scope="module", autouse=True)
def killed_runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Any, Any]]:
    """The folder of each run that is killed, and its process; all are started before the first
    test.
    """
    items: list[Any] = request.session.items
    kills = [
        item.callspec.params["kill"] for item in items if "after_a_kill_during_a_save" in item.name
    ]
    base = tmp_path_factory.mktemp("killed")
    with ForkServer(["tests.engine.checkpoints.small_run"]) as server:
        runs = {}
        for number, kill in enumerate(kills):
            folder = base / str(number)
            SmallRun(folder, max_to_keep=2, run_id=RUN_ID).train_to(2, 3)
            for name in FOREIGN:
                (folder / name).write_text("mine")
            runs[kill] = (folder, server.start(save_and_die, str(folder), *kill[:3]))
        yield runs


@pytest.fixture
def without_faults() -> Iterator[None]:
    """Takes back what a test asked for."""
    yield
    files.on_write_point = None


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _leave_free(disk: Path, pages: int) -> None:
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - pages * PAGE))


def _assert_explains(error: StorageError, path: Path) -> None:
    message = str(error)
    assert message.startswith(f"the checkpoint {path} was ")
    assert "No space left on device" in message
    assert " bytes are free there)" in message
    assert "{{" not in message
    assert len(message.splitlines()) <= 3


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_disk_full_at_any_file_is_reported_and_loses_nothing(
    small_disk: Path, asynchronous: bool
) -> None:
    folder = small_disk / "run"
    SmallRun(folder, 3000, max_to_keep=2).train_to(1, 2)
    newest_step = 2
    messages = []
    for pages in range(12) if asynchronous else (0, 4, 6, 9, 10, 11):
        run = SmallRun(folder, 3000, max_to_keep=2, asynchronous=asynchronous)
        assert run.start == newest_step

        _leave_free(small_disk, pages)
        try:
            run.train_to(newest_step + 1)
        except StorageError as error:
            _assert_explains(error, folder / f"ckpt-{newest_step + 1}")
            assert error.exit_code == ExitCode.STORAGE
            messages.append(str(error))

        checkpoints = {name.split(".")[0] for name in names(folder)} - {"checkpoint"}
        assert len(checkpoints) >= 2  # as many as are kept
        assert f"ckpt-{newest_step}" in checkpoints
        assert all(describe_damage(str(folder / name)) == "" for name in checkpoints)
        assert [name for name in names(folder) if "tmp" in name or "temp" in name] == []

        # There is room again, for the same process too.
        (small_disk / "ballast").unlink()
        newest_step = SmallRun(folder, 3000, max_to_keep=2).start + 1
        run.train_to(newest_step)

    for file in (
        ".iterator_temp/",
        ".iterator.index;",
        "_temp/part-00000-of-00001.data",
        ".index;",
        "/checkpoint cannot",
    ):
        assert any(file in message for message in messages), (file, messages)
    assert len(messages) == (11 if asynchronous else 5)  # the last had room


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("how", ["record", "file size"])
def test_a_save_that_fails_is_told_once_and_can_be_made_again(
    tmp_path: Path, how: str, asynchronous: bool, without_faults: None
) -> None:
    run = SmallRun(tmp_path, 100_000, asynchronous=asynchronous)
    run.train_to(1, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "record":
        stop_at("checkpoint.record.flush", how="raise")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(StorageError) as error:
            run.train_to(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    reason = "No space left on device" if how == "record" else "File too large"
    assert f"the checkpoint {tmp_path}/ckpt-3 was not written: " in str(error.value)
    assert reason in str(error.value)
    assert names(tmp_path) == sorted(["checkpoint", *parts(1), *parts(2)])

    run.manager.sync()
    run.train_to(3)
    assert SmallRun(tmp_path, 100_000).start == 3


@pytest.mark.parametrize("again", ["next start", "next save"])
@pytest.mark.parametrize("move", [1, 3, 4, 5])
def test_a_failed_move_of_a_step_saved_again_loses_nothing(
    tmp_path: Path, move: int, again: str, without_faults: None
) -> None:
    run = SmallRun(tmp_path)
    run.train_to(1)
    stop_at("checkpoint.move", move, how="raise")
    with pytest.raises(StorageError, match="ckpt-1 was not written"):
        run.train_to(1, again=True)

    if again == "next save":
        run.train_to(1)
        assert names(tmp_path) == sorted(["checkpoint", *parts(1)])
    assert SmallRun(tmp_path).start == 1
    assert names(tmp_path) == sorted(["checkpoint", *parts(1)])


def test_the_next_save_reports_a_failed_background_save_by_name(
    tmp_path: Path, without_faults: None
) -> None:
    run = SmallRun(tmp_path)
    run.train_to(1)
    stop_at("checkpoint.record.open", how="raise")
    run.train_to(2, sync=False)

    message = r"ckpt-2 was not written: .*ckpt-2\.commit\.json cannot be written: No space"
    with pytest.raises(StorageError, match=message):
        run.train_to(3)
    assert names(tmp_path) == sorted(["checkpoint", *parts(1)])
    run.train_to(3)
    assert names(tmp_path) == sorted(["checkpoint", *parts(1), *parts(3)])


def test_a_failed_preparation_leaves_the_save_in_flight_alone(
    tmp_path: Path, without_faults: None
) -> None:
    run = SmallRun(tmp_path)
    run.train_to(1, sync=False)
    stop_at("checkpoint.save", how="raise")

    with pytest.raises(StorageError, match=r"ckpt-2 was not written: No space left on device"):
        run.train_to(2)
    assert names(tmp_path) == sorted(["checkpoint", *parts(1)])
    assert SmallRun(tmp_path).start == 1


def test_the_runs_error_is_raised_and_the_failed_save_is_logged(
    tmp_path: Path, without_faults: None, caplog: pytest.LogCaptureFixture
) -> None:
    run = SmallRun(tmp_path)
    run.train_to(1)
    stop_at("checkpoint.record.open", how="raise")

    with pytest.raises(ZeroDivisionError), run.manager:
        run.train_to(2, sync=False)
        raise ZeroDivisionError
    assert "ckpt-2 was not written" in caplog.text
    assert names(tmp_path) == sorted(["checkpoint", *parts(1)])
    with pytest.raises(StorageError, match="ckpt-2 was not written"), run.manager:
        stop_at("checkpoint.record.open", how="raise")
        run.train_to(2, sync=False)


def test_a_saved_checkpoint_and_its_iterator_are_not_saved_again(tmp_path: Path) -> None:
    SmallRun(tmp_path).train_to(1)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in parts(1)}
    run = SmallRun(tmp_path)

    assert run.manager.save(1) is None
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in parts(1)} == before


# ---- rotation


def test_rotation_removes_oldest_records_first_and_keeps_pins(
    tmp_path: Path, without_faults: None
) -> None:
    run = SmallRun(tmp_path, max_to_keep=2)
    run.train_to(1, 2, 3)
    (tmp_path / "ckpt-2.pin").touch()
    removed: list[str] = []

    def note_removal(point: str, path: str) -> None:
        if point == "checkpoint.remove":
            removed.append(Path(path).name)

    files.on_write_point = note_removal
    run.train_to(4, 5)
    assert removed == [f"ckpt-3.{kind}" for kind in REMOVED]
    assert names(tmp_path) == sorted(["checkpoint", "ckpt-2.pin", *parts(2), *parts(4), *parts(5)])
    listed = tf.train.get_checkpoint_state(str(tmp_path)).all_model_checkpoint_paths
    assert [Path(path).name for path in listed] == ["ckpt-2", "ckpt-4", "ckpt-5"]

    (tmp_path / "ckpt-2.pin").unlink()
    SmallRun(tmp_path, max_to_keep=2).train_to(6)
    assert names(tmp_path) == sorted(["checkpoint", *parts(5), *parts(6)])


def test_a_checkpoint_that_others_removed_is_not_an_error(
    tmp_path: Path, without_faults: None
) -> None:
    run = SmallRun(tmp_path, max_to_keep=1)
    run.train_to(1)

    def remove_first(point: str, path: str) -> None:
        if point == "checkpoint.remove":
            Path(path).unlink()

    files.on_write_point = remove_first
    run.train_to(2)
    assert names(tmp_path) == sorted(["checkpoint", *parts(2)])


def test_a_worker_that_is_not_chief_keeps_one_copy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallRun(tmp_path).train_to(1)
    monkeypatch.setattr(manager, "is_chief", lambda _: False)
    monkeypatch.setattr(manager, "worker_index", lambda _: 2)
    monkeypatch.setattr(manager, "broadcast_int", lambda *_: 1)
    before = names(tmp_path)
    attempts = tmp_path / "workers/2/attempts.jsonl"
    attempts.parent.mkdir(parents=True)
    attempts.write_text("of the supervisor")
    for steps in ((2, 3), (2,)):  # the second process begins where the first one was killed
        other = SmallRun(tmp_path, max_to_keep=5)
        assert other.start == 1
        other.train_to(*steps)
        assert names(tmp_path / "workers/2/checkpoints") == ["checkpoint", *parts(steps[-1])]
        assert other.manager.find_newest() == f"{tmp_path}/ckpt-1"
    other.manager.__exit__(None, None, None)

    assert names(tmp_path) == [*before, "workers"]
    assert names(tmp_path / "workers/2") == ["attempts.jsonl"]


def test_a_discarded_checkpoints_step_can_be_saved_again(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.train_to(1, 2)
    run.trainer.state = SimpleNamespace(
        optional_sections=(), all_finite=iter([False, True]).__next__
    )

    path = run.manager.restore_finite(f"{tmp_path}/ckpt-2")
    assert path == run.manager.latest_checkpoint == f"{tmp_path}/ckpt-1"
    assert names(tmp_path / "diverged") == parts(2)

    run.train_to(2)
    assert SmallRun(tmp_path).start == 2


# ---- the best checkpoint


@pytest.mark.parametrize("point", ["best.weights", "best.record.open", "best.record.rename"])
def test_a_best_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, point: str, without_faults: None
) -> None:
    value = tf.Variable(1)
    checkpoint = tf.train.Checkpoint(value=value)
    best = BestWeightsExporter(str(tmp_path), "accuracy")
    best.maybe_export_checkpoint(checkpoint, {"accuracy": 0.5}, 1)
    stop_at(point, how="raise")
    message = r"the checkpoint .*ckpt-2 was not written: .*bytes are free there"
    with pytest.raises(StorageError, match=message):
        best.maybe_export_checkpoint(checkpoint, {"accuracy": 0.6}, 2)
    assert [name for name in names(tmp_path) if name.endswith(("tmp", "temp"))] == []

    again = BestWeightsExporter(str(tmp_path), "accuracy")
    assert again.best == ("accuracy", 0.5, 1)
    assert again.maybe_export_checkpoint(checkpoint, {"accuracy": 0.6}, 2)
    assert {name.split(".")[0] for name in names(tmp_path)} == {"checkpoint", "info", "ckpt-2"}


@pytest.mark.parametrize("point", ["best.info.flush", "best.pointer.open", "best.pointer.rename"])
def test_a_pointer_that_cannot_be_written_names_whole_weights(
    tmp_path: Path, point: str, without_faults: None
) -> None:
    checkpoint = tf.train.Checkpoint(value=tf.Variable(1))
    best = BestWeightsExporter(str(tmp_path), "accuracy")
    best.maybe_export_checkpoint(checkpoint, {"accuracy": 0.5}, 1)
    stop_at(point, how="raise")
    message = r"was written, but the file that names it was not.*bytes are free there"

    with pytest.raises(StorageError, match=message):
        best.maybe_export_checkpoint(checkpoint, {"accuracy": 0.6}, 2)
    assert tf.train.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/ckpt-1"
    assert BestWeightsExporter(str(tmp_path), "accuracy").best == ("accuracy", 0.6, 2)
    assert tf.train.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/ckpt-2"


def test_a_best_on_a_full_disk_is_told_with_what_is_free(small_disk: Path) -> None:
    checkpoint = tf.train.Checkpoint(value=tf.Variable(tf.zeros([5000])))
    best = BestWeightsExporter(str(small_disk / "best"), "accuracy")
    best.maybe_export_checkpoint(checkpoint, {"accuracy": 0.5}, 1)
    before = names(small_disk / "best")
    _leave_free(small_disk, 2)
    message = r"ckpt-2 was not written: .*No space left.*bytes are free"

    with pytest.raises(StorageError, match=message):
        best.maybe_export_checkpoint(checkpoint, {"accuracy": 0.6}, 2)
    assert names(small_disk / "best") == before


# ---- kills, whose processes have had the time of the tests above


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: " ".join(map(str, kill[:3])))
def test_a_run_resumes_after_a_kill_during_a_save(
    killed_runs: dict[Any, Any], kill: tuple[str, int, bool, int], caplog: pytest.LogCaptureFixture
) -> None:
    folder, process = killed_runs[kill]
    end = process.wait()
    assert end.code == -signal.SIGKILL, end.text
    point, occurrence, _, start = kill
    if point == "checkpoint.remove":
        left = {f"ckpt-2.{kind}" for kind in REMOVED[occurrence - 1 :]}
        assert left == {name for name in names(folder) if name.startswith("ckpt-2.")}
    run = SmallRun(folder, max_to_keep=2, run_id=RUN_ID)
    assert run.start == start
    for record in caplog.records:
        is_ours = record.name.startswith("trainer_kit")
        assert not is_ours or record.levelno < logging.WARNING, record.getMessage()

    run.train_to(5, 6)
    assert names(folder) == sorted(["checkpoint", *FOREIGN, *parts(5), *parts(6)])
    assert SmallRun(folder, max_to_keep=2, run_id=RUN_ID).start == 6
