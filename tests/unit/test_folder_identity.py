"""A folder that is moved, removed or replaced while it is held."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer_kit import files, folder_identity
from trainer_kit.errors import ExitCode, StorageError
from trainer_kit.folder_identity import FolderIdentity, check_held, held_if_there, lost_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a checkpoint of step 30."""
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (20, 30):
        (folder / f"ckpt-{step}.index").touch()
    return folder


def _moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _replaced(folder: Path) -> None:
    _moved(folder)
    folder.mkdir()


def _copied(folder: Path) -> None:
    _moved(folder)
    shutil.copytree(folder.with_name("elsewhere"), folder)


def _made_again(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "ckpt-1.index").touch()


@pytest.fixture
def unstable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system like some of FUSE, 9p and virtiofs: the folder has another inode number each time, and no links."""
    numbers = itertools.count(1 << 40)

    def changed(found: os.stat_result) -> os.stat_result:
        return os.stat_result((found.st_mode, next(numbers), found.st_dev, 0, *found[4:10]))

    there = {"stat": lambda path: changed(os.stat(path)), "fstat": lambda number: changed(os.fstat(number))}
    monkeypatch.setattr(folder_identity, "os", SimpleNamespace(**{**vars(os), **there}))


def test_a_folder_whose_inode_number_changes_is_still_the_same(folder: Path, unstable: None) -> None:
    with FolderIdentity(folder) as held:
        (folder / "ckpt-40.index").touch()
        assert held.look() == ""
        files.write_text(folder / "one.txt", "1")


@pytest.mark.parametrize("end", [_moved, _replaced, _copied, _made_again, shutil.rmtree])
def test_a_lost_folder_is_noticed_where_inode_numbers_change(
    folder: Path, unstable: None, end: Callable[[Path], None]
) -> None:
    with FolderIdentity(folder) as held:
        end(folder)
        assert f"{folder} was moved or removed during the run" in held.look()


def test_a_file_that_comes_during_the_check_does_not_matter(
    folder: Path, unstable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = [folder / "one", folder / "two"]

    def list_and_write(place: str | int) -> list[str]:
        names = os.listdir(place)
        if coming and isinstance(place, int):
            coming.pop().touch()
        return names

    monkeypatch.setattr(folder_identity.os, "listdir", list_and_write)
    with FolderIdentity(folder) as held:
        assert held.look() == ""
    assert not coming


@pytest.mark.parametrize("end", [_moved, _replaced, _copied, _made_again, shutil.rmtree])
def test_nothing_is_written_at_the_old_path_of_a_lost_folder(folder: Path, end: Callable[[Path], None]) -> None:
    with FolderIdentity(folder):
        files.write_text(folder / "evals" / "one.txt", "1")
        end(folder)
        before = set(os.listdir(folder)) if os.path.exists(folder) else None
        for write in (files.write_text, lambda path, text: files.append_line(path, {"text": text})):
            with pytest.raises(StorageError, match=rf"{folder} was moved or removed during the run: ") as error:
                write(folder / "evals" / "two.txt", "2")
        assert (set(os.listdir(folder)) if os.path.exists(folder) else None) == before
    assert error.value.exit_code == ExitCode.STORAGE
    files.write_text(folder / "later.txt", "another run may begin here")


@pytest.mark.parametrize("end", [_moved, shutil.rmtree])
def test_a_folder_lost_during_a_write_is_not_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Path], None]
) -> None:
    def check_and_lose(path: Path) -> None:
        check_held(path)
        end(folder)

    monkeypatch.setattr(folder_identity, "check_held", check_and_lose)
    with FolderIdentity(folder), pytest.raises(StorageError, match="was moved or removed during the run"):
        files.write_text(folder / "evals" / "one.txt", "1")
    assert not folder.exists()


def test_the_message_names_the_new_path_and_newest_checkpoint(folder: Path) -> None:
    with FolderIdentity(folder) as held:
        _moved(folder)
        assert held.lost == ""
        assert f"it is now at {folder.with_name('elsewhere')}, with checkpoints up to step 30. Move" in held.look()
        assert "was not changed" not in held.look()
    with FolderIdentity(folder.with_name("elsewhere")) as held:
        _replaced(folder.with_name("elsewhere").rename(folder))
        folder.rename(folder.with_name("again"))
        shutil.rmtree(folder.parent)
        assert "none of its checkpoints was found" in held.look()


def test_a_folder_that_was_seen_to_be_lost_stays_lost(folder: Path) -> None:
    with FolderIdentity(folder) as held:
        _moved(folder)
        folder.with_name("elsewhere").rename(folder)
        assert held.look() == ""  # nobody has seen it
        _moved(folder)
        assert held.look()
        folder.with_name("elsewhere").rename(folder)
        assert held.look() == lost_folder(folder / "ckpt-40") != ""


def test_other_folders_are_written_as_ever(folder: Path) -> None:
    with FolderIdentity(folder):
        shutil.rmtree(folder)
        check_held(folder.with_name("run2"))
        files.write_text(folder.with_name("run2") / "one.txt", "1")


def test_a_folder_that_does_not_exist_cannot_be_held(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be used: No such file"), FolderIdentity(tmp_path / "nowhere"):
        pass
    with held_if_there(tmp_path / "nowhere"):
        files.write_text(tmp_path / "nowhere" / "one.txt", "1")
    with held_if_there(tmp_path / "nowhere"):
        shutil.rmtree(tmp_path / "nowhere")
        with pytest.raises(StorageError):
            check_held(tmp_path / "nowhere" / "one.txt")


def test_links_are_followed_once(folder: Path) -> None:
    link = folder.with_name("latest")
    link.symlink_to("run")
    assert files.follow_links(str(link)) == os.path.realpath(folder)
    assert files.follow_links(os.path.relpath(folder)) == os.path.realpath(folder)
    assert files.follow_links("~/run") == os.path.realpath(os.path.expanduser("~/run"))
    assert files.follow_links("gs://bucket/run") == "gs://bucket/run"
