"""Text files at local and remote paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.compat.model_garden.files.text_files import write_text
from trainer_kit.errors import StorageError


def test_a_local_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for text in ("one\n", "two\n"):
        write_text(tmp_path / "new" / "a.txt", text)
    assert (tmp_path / "new" / "a.txt").read_text() == "two\n"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]


def test_a_path_of_a_file_system_of_tensorflow_is_written_through_it() -> None:
    write_text("ram://folder/a.txt", "text\n")
    with tf.io.gfile.GFile("ram://folder/a.txt") as stream:
        assert stream.read() == "text\n"


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/a\.txt cannot be written"):
        write_text(tmp_path / "file" / "a.txt", "text")
    with pytest.raises(StorageError, match=r"nothing://a\.txt cannot be written"):
        write_text("nothing://a.txt", "text")
