"""What a trainer finds when it starts: damage, nothing whole, and what dead processes have left."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tests.engine.checkpoints.small_run import RUN_ID, SmallRun, flip_bit, names, parts
from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import (
    create_write_error,
    describe_damage,
    finish_interrupted_saves,
    read_commit_record,
    remove_checkpoint,
)
from trainer_kit.checkpoints.retention import remove_old_checkpoints
from trainer_kit.checkpoints.startup_scan import (
    DAMAGED,
    archive_later_checkpoints,
    find_unfinished_rewind,
    finish_rewind,
    recover_newest_checkpoint,
    set_aside,
)
from trainer_kit.errors import ExitCode, StorageError

RECORD, DATA, INDEX, ITERATOR, ITERATOR_INDEX = parts(3)
FOREIGN = (
    "ckpt-final.txt",
    "ckpt-2.notes",
    "my-ckpt-3.index",
    "notes.md",
    ".ckpt-3.swp",
    "checkpoint.bak",
    "x_temp",
)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has saved steps 1 to 3. Tests copy it."""
    folder = tmp_path_factory.mktemp("saved")
    SmallRun(folder).train_to(1, 2, 3)
    return folder


@pytest.fixture
def folder(saved_folder: Path, tmp_path: Path) -> Path:
    """The same, for one test."""
    return Path(shutil.copytree(saved_folder, tmp_path / "run"))


def _list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty_file(path: Path) -> None:
    path.write_bytes(b"")


# ---- damage of the newest checkpoint


@pytest.mark.parametrize("name", [DATA, INDEX, ITERATOR, ITERATOR_INDEX])
@pytest.mark.parametrize("damage", [_cut, Path.unlink, flip_bit, _empty_file])
@pytest.mark.parametrize("recorded", [True, False], ids=["with record", "without"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_previous(
    folder: Path,
    name: str,
    damage: Callable[[Path], None],
    recorded: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(folder / name)
    if not recorded:
        (folder / RECORD).unlink()
    left = [part for part in parts(3) if (folder / part).exists()]

    run = SmallRun(folder, asynchronous=False)

    assert run.start == 2

    told = _list_warnings(caplog)
    assert len(told) == 1
    assert f"{folder}/ckpt-3 is damaged: " in told[0]
    assert f"{folder}/ckpt-2 is used" in told[0]
    assert names(folder) == sorted(["checkpoint", "damaged", *parts(1), *parts(2)])
    assert names(folder / DAMAGED) == left
    assert tf.train.latest_checkpoint(str(folder)) == f"{folder}/ckpt-2"

    caplog.clear()

    assert SmallRun(folder).start == 2
    assert _list_warnings(caplog) == []

    run.train_to(3)

    assert SmallRun(folder).start == 3


@pytest.mark.parametrize("damage", [_empty_file, _cut, Path.unlink])
def test_the_pointer_file_is_made_again_and_nothing_is_lost(
    folder: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder / "checkpoint")

    assert SmallRun(folder).start == 3
    assert _list_warnings(caplog) == []

    state = tf.train.get_checkpoint_state(str(folder))
    assert state.model_checkpoint_path == f"{folder}/ckpt-3"
    assert list(state.all_model_checkpoint_paths) == [f"{folder}/ckpt-{step}" for step in (1, 2, 3)]


def test_a_repaired_pointer_in_a_relative_folder_points_into_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "checkpoint").unlink()

    assert recover_newest_checkpoint("run") == "run/ckpt-3" == tf.train.latest_checkpoint("run")

    archive_later_checkpoints("run", 2)

    assert tf.train.latest_checkpoint("run") == "run/ckpt-2"
    assert SmallRun(Path("run")).start == 2


@pytest.mark.parametrize("damage", [_empty_file, _cut, flip_bit, Path.unlink])
def test_a_whole_checkpoint_without_a_good_record_is_used(
    folder: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder / RECORD)
    run = SmallRun(folder)

    # A record with another name or checksum cannot be told from damage.
    if damage is flip_bit and run.start == 2:
        assert any(
            text in caplog.text for text in ("wrong checksum", "bytes instead of", "is missing")
        )
        return

    assert run.start == 3
    assert _list_warnings(caplog) == []

    there = read_commit_record(str(folder / "ckpt-3"))
    # It may be of another program, and is no checkpoint of ours then.
    assert (there is None) == (damage is Path.unlink)

    if there is not None:
        assert there["files"].keys() == {*parts(3)[1:]}
        assert describe_damage(str(folder / "ckpt-3")) == ""


def test_a_damaged_record_is_rewritten_with_the_run_id(folder: Path) -> None:
    _cut(folder / RECORD)
    run = SmallRun(folder, max_to_keep=1, run_id="ours")

    assert (read_commit_record(str(folder / "ckpt-3")) or {})["run_id"] == "ours"

    run.train_to(4)

    assert list(complete_checkpoints(str(folder))) == [4]


def test_evaluation_with_a_torn_pointer_file_moves_nothing(folder: Path) -> None:
    for text in ("", 'model_checkpoint_path: "ck'):
        (folder / "checkpoint").write_text(text)
        before = names(folder)
        reader = SmallRun(folder, can_train=False)
        assert reader.start == 0
        assert reader.manager.latest_checkpoint == f"{folder}/ckpt-3"
        assert names(folder) == before
        assert (folder / "checkpoint").read_text() == text


# ---- nothing whole


@pytest.mark.parametrize("pointer", ["as it was", "", None])
@pytest.mark.parametrize("kind", [1, 2, 3, 4], ids=["data", "index", "iterator", "iterator index"])
def test_with_only_damaged_checkpoints_the_run_does_not_start(
    folder: Path, pointer: str | None, kind: int
) -> None:
    for step in (1, 2, 3):
        flip_bit(folder / parts(step)[kind])
    if pointer is None:
        (folder / "checkpoint").unlink()
    elif not pointer:
        (folder / "checkpoint").write_text("")

    before = {name: (folder / name).read_bytes() for name in names(folder)}

    for _ in range(2):
        with pytest.raises(StorageError) as error:
            SmallRun(folder)
        assert {name: (folder / name).read_bytes() for name in names(folder)} == before

    assert error.value.exit_code == ExitCode.STORAGE

    told = str(error.value)
    assert told.startswith(f"no checkpoint in {folder} is whole (ckpt-3: ")
    assert "; ckpt-1: " in told
    assert "--from_step=0" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("kept", ["checkpoint", DATA, INDEX, RECORD])
def test_one_file_of_a_checkpoint_prevents_a_start_from_step_0(folder: Path, kept: str) -> None:
    for name in names(folder):
        if name != kept:
            (folder / name).unlink()

    with pytest.raises(StorageError, match=r"no checkpoint in .* is whole"):
        SmallRun(folder)

    assert names(folder) == [kept]


def test_an_unfinished_rewind_is_known_until_it_is_done(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_unfinished_rewind(str(folder)) is None

    archive_later_checkpoints(str(folder), 1)

    assert (
        f"later ones were moved: {folder}/archived/ckpt-2, {folder}/archived/ckpt-3" in caplog.text
    )
    assert names(folder) == sorted(["archived", "checkpoint", *parts(1)])
    assert find_unfinished_rewind(str(folder)) == 1
    assert SmallRun(folder).manager.rewind_step == 1

    finish_rewind(str(folder))

    assert find_unfinished_rewind(str(folder)) is None
    assert SmallRun(folder).manager.rewind_step is None

    finish_rewind(str(folder))
    (folder / "archived" / "going_back.json").write_text("{")

    with pytest.raises(
        StorageError, match=r"going_back\.json cannot be read.*start again with --from_step=N"
    ):
        find_unfinished_rewind(str(folder))


def test_only_a_lost_checkpoint_is_missed_not_a_moved_one(folder: Path) -> None:
    for step in (3, 2):
        set_aside(str(folder / f"ckpt-{step}"), "diverged")

    assert recover_newest_checkpoint(str(folder)) == str(folder / "ckpt-1")

    set_aside(str(folder / "ckpt-1"), "diverged")

    assert recover_newest_checkpoint(str(folder)) is None

    run = SmallRun(folder)
    run.train_to(2)
    for path in folder.glob("ckpt-*"):
        path.unlink()

    # Though those moved away are namesakes.
    with pytest.raises(StorageError, match=r"no checkpoint in .* is whole"):
        recover_newest_checkpoint(str(folder))


@pytest.mark.parametrize("moved", range(len(parts(3)) + 1))
def test_a_move_that_was_cut_off_is_no_trap(
    folder: Path, moved: int, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / DAMAGED).mkdir()

    for name in parts(3)[:moved]:  # in the order of set_aside
        os.replace(folder / name, folder / DAMAGED / name)

    start = 3 if moved <= 1 else 2
    assert SmallRun(folder).start == start
    if start == 3:
        assert names(folder / DAMAGED) == parts(3)[:moved]

    caplog.clear()

    assert SmallRun(folder).start == start
    assert _list_warnings(caplog) == []


def test_setting_aside_moves_all_files_of_a_checkpoint_only(folder: Path) -> None:
    (folder / "ckpt-3.pin").touch()

    assert set_aside(str(folder / "ckpt-3"), "diverged") == str(folder / "diverged")
    assert names(folder / "diverged") == parts(3)
    assert names(folder) == sorted(["checkpoint", "ckpt-3.pin", "diverged", *parts(1), *parts(2)])

    (folder / "file").touch()

    with pytest.raises(StorageError, match=r"ckpt-2 cannot be moved to .*file"):
        set_aside(str(folder / "ckpt-2"), "file")


# ---- what dead processes leave


def _write_half_an_index(folder: Path) -> None:
    (folder / "ckpt-4_temp").mkdir()
    (folder / "ckpt-4_temp" / "part-00000-of-00001.data-00000-of-00001").write_text("x")
    shutil.copy(folder / DATA, folder / parts(4)[1])
    (folder / parts(4)[2]).write_bytes((folder / INDEX).read_bytes()[:100])


def _write_half_an_iterator(folder: Path) -> None:
    (folder / "ckpt-4.iterator_temp").mkdir()
    shutil.copy(folder / ITERATOR, folder / parts(4)[3])


def _write_half_texts(folder: Path) -> None:
    for name in (
        f".ckpt-3.commit.json.{os.getpid()}.tmp",
        ".final.json.99999999.tmp",
        "checkpoint.tmp" + 32 * "a",
    ):
        (folder / name).write_text("{")


def _mark_as_earlier(folder: Path) -> None:
    (folder / ".saving-ckpt-4.ours").touch()
    shutil.copy(folder / DATA, folder / parts(4)[1])


def _leave_whole_save(folder: Path) -> None:
    saving = folder / ".saving-ckpt-3"
    saving.mkdir()
    for name in parts(3):
        (folder / name).rename(saving / name)


def _move_half(folder: Path) -> None:
    _leave_whole_save(folder)
    for name in (DATA, ITERATOR):
        (folder / ".saving-ckpt-3" / name).rename(folder / name)


def _remove_half(folder: Path) -> None:
    (folder / ".saving-ckpt-4").mkdir()
    for old, new in zip(parts(3)[1:4], parts(4)[1:4], strict=True):
        shutil.copy(folder / old, folder / new)


LEFT = {
    "index half written": _write_half_an_index,
    "iterator half written": _write_half_an_iterator,
    "half texts": _write_half_texts,
    "mark of an earlier version": _mark_as_earlier,
    "whole save": _leave_whole_save,
    "whole save, half moved": _move_half,
    "removal": _remove_half,
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_a_dead_process_left_is_removed_without_a_word(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in FOREIGN:
        (folder / name).write_text("mine")
    (folder / "ckpt-5_temp.d").mkdir()
    LEFT[kind](folder)

    assert SmallRun(folder).start == 3
    assert _list_warnings(caplog) == []

    there = set(names(folder)) - {"checkpoint", *FOREIGN, "ckpt-5_temp.d"}
    assert there == {*parts(1), *parts(2), *parts(3)}
    assert all((folder / name).read_text() == "mine" for name in FOREIGN)


@pytest.mark.parametrize("kind", ["index half written", "iterator half written"])
def test_after_an_interrupted_first_save_the_run_starts_from_0(
    saved_folder: Path, tmp_path: Path, kind: str
) -> None:
    for name in (DATA, INDEX, ITERATOR, ITERATOR_INDEX):
        shutil.copy(saved_folder / name, tmp_path / name)
    LEFT[kind](tmp_path)
    for name in (DATA, INDEX, ITERATOR, ITERATOR_INDEX):
        (tmp_path / name).unlink()

    assert SmallRun(tmp_path).start == 0
    assert names(tmp_path) == []


def test_rotation_counts_what_an_earlier_version_marked(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"ckpt-{step}.commit.json").unlink()
        (folder / f".saving-ckpt-{step}.{RUN_ID}").touch()

    run = SmallRun(folder, max_to_keep=2, run_id=RUN_ID)

    assert names(folder) == sorted(["checkpoint", *parts(2), *parts(3)])
    assert (read_commit_record(str(folder / "ckpt-2")) or {})["run_id"] == RUN_ID

    run.train_to(4)

    assert names(folder) == sorted(["checkpoint", *parts(3), *parts(4)])


def test_a_heartbeat_that_this_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f".heartbeat.json.{os.getpid()}.tmp").touch()
    (tmp_path / f".heartbeat.json.{os.getpid() + 1}.tmp").touch()

    finish_interrupted_saves(str(tmp_path))

    assert names(tmp_path) == [f".heartbeat.json.{os.getpid()}.tmp"]


def test_setting_aside_a_step_twice_keeps_both(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        (tmp_path / "ckpt-5.index").write_text(text)
        (tmp_path / "ckpt-5.data-00000-of-00001").write_text(text)
        set_aside(str(tmp_path / "ckpt-5"), "archived")

    kept = [tmp_path / "archived" / place / "ckpt-5.index" for place in ("", "2", "3")]

    assert [path.read_text() for path in kept] == ["first", "second", "third"]


@pytest.mark.parametrize(("keep", "left"), [(0, [2]), (1, [2, 3]), (3, [1, 2, 3])])
def test_removing_old_ones_keeps_newest_pinned_and_foreign_ones(
    folder: Path, keep: int, left: list[int]
) -> None:
    for name in (*FOREIGN, "ckpt-2.pin"):
        (folder / name).touch()

    remove_old_checkpoints(str(folder), keep, run_id="")

    assert list(complete_checkpoints(str(folder))) == left

    own = {name for step in left for name in parts(step)}
    assert set(names(folder)) == {*own, *FOREIGN, "ckpt-2.pin", "checkpoint"}
    assert recover_newest_checkpoint(str(folder)) == f"{folder}/ckpt-{left[-1]}"


def test_the_record_of_a_checkpoint_is_removed_before_its_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(
        files, "on_write_point", lambda point, path: removed.append(os.path.basename(path))
    )

    remove_checkpoint(str(folder / "ckpt-1"))
    of_checkpoint = [name for name in removed if name.startswith("ckpt-1.")]

    assert of_checkpoint[0] == "ckpt-1.commit.json"
    assert [".data-" in name for name in of_checkpoint[1:]] == sorted(
        ".data-" in name for name in of_checkpoint[1:]
    )


def test_only_a_full_disk_asks_for_space(tmp_path: Path) -> None:
    denied = tf.errors.PermissionDeniedError(
        None, None, f"{tmp_path}/ckpt-1.index; Permission denied"
    )

    full = OSError(28, "No space left on device")

    denied_error = create_write_error("ckpt-1 was not written", str(tmp_path), denied)
    full_error = create_write_error("ckpt-1 was not written", str(tmp_path), full)

    assert str(denied_error) == (
        f"ckpt-1 was not written: {tmp_path}/ckpt-1.index; Permission denied; give a writable"
        " folder"
    )
    assert "free some space" in str(full_error)
