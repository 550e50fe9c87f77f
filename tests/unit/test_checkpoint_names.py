"""Which files are of which checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_kit.checkpoint_names import (
    complete_checkpoints,
    list_checkpoint_files,
    parse_checkpoint_name,
    parse_step,
)

OWN = (
    "ckpt-10.index",
    "ckpt-10.data-00000-of-00002",
    "ckpt-10.data-00001-of-00002",
    "ckpt-10.commit.json",
    "ckpt-10.iterator.index",
    "ckpt-10.iterator.data-00000-of-00001",
    "ckpt-10.iterator-1.index",
    "ckpt-10.iterator-12.data-00000-of-00001",
)
FOREIGN = (
    "ckpt-10",
    "ckpt-10.pin",
    "ckpt-10.txt",
    "ckpt-10.index.bak",
    "ckpt-10.meta",
    "ckpt-10.iterator.commit.json",
    "ckpt-10.iterator-one.index",
    "ckpt-10.data-0-of-1",
    "ckpt-final.index",
    "ckpt-.index",
    "my-ckpt-10.index",
    ".ckpt-10.commit.json.7.tmp",
    "checkpoint",
)


@pytest.mark.parametrize("name", OWN)
def test_the_files_of_a_checkpoint_have_an_owner(name: str) -> None:
    assert parse_checkpoint_name(name) == "ckpt-10"


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_other_names_have_none(name: str) -> None:
    assert parse_checkpoint_name(name) is None


def test_own_files_are_those_of_exactly_that_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "a [folder]"
    folder.mkdir()

    for name in (*OWN, *FOREIGN, "ckpt-100.index", "ckpt-1.index"):
        (folder / name).touch()

    assert list_checkpoint_files(str(folder / "ckpt-10")) == sorted(
        str(folder / name) for name in OWN
    )
    assert list_checkpoint_files(str(folder / "ckpt-7")) == []


def test_the_step_is_the_number_at_the_end() -> None:
    assert parse_step("/runs/2026-11-21/ckpt-1200") == 1200


def test_checkpoints_with_an_index_are_listed_in_order(tmp_path: Path) -> None:
    indices = [f"ckpt-{step}.index" for step in (100, 20, 3)]
    others = (
        "ckpt-7.data-00000-of-00001",
        "ckpt-8.index.tmp",
        "other-9.index",
        "ckpt-x.index",
        "ckpt-6.commit.json",
    )

    for name in (*indices, *others, "ckpt-5.iterator.index"):
        (tmp_path / name).touch()

    assert list(complete_checkpoints(str(tmp_path)).items()) == [
        (step, f"{tmp_path}/ckpt-{step}") for step in (3, 20, 100)
    ]
    assert complete_checkpoints(str(tmp_path / "missing")) == {}
    assert complete_checkpoints(str(tmp_path / "other-9.index")) == {}


def test_a_folder_that_is_moved_meanwhile_has_no_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_moved_folder(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", list_moved_folder)

    assert complete_checkpoints(str(tmp_path)) == {}
