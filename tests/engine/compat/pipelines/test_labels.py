"""labels.txt, and the share of its classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.compat.pipelines import get_labels
from trainer_kit.errors import DataError, UsageError


@pytest.mark.parametrize(
    "content",
    ["犬\n猫\n", "犬\r\n猫", "\n犬\n\n  猫 \n\n", "\ufeff犬\n猫\n"],
    ids=["plain", "crlf", "blank", "mark"],
)
def test_each_line_is_a_label(tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.txt").write_bytes(content.encode())
    assert get_labels(str(tmp_path)) == (2, ["犬", "猫"])


@pytest.mark.parametrize(("percentage", "count"), [(100, 7), (100.0, 7), (50, 3), (1, 1), (99, 6)])
def test_a_percentage_takes_the_first_classes(
    tmp_path: Path, percentage: float, count: int
) -> None:
    (tmp_path / "labels.txt").write_text("".join(f"{number}\n" for number in range(7)))
    assert get_labels(tmp_path, percentage) == (count, [str(number) for number in range(count)])


@pytest.mark.parametrize("percentage", [0, -5, 0.5, 101, "half", None, float("nan")])
def test_other_percentages_are_refused(tmp_path: Path, percentage: float) -> None:
    with pytest.raises(UsageError, match="not from 1 to 100"):
        get_labels(tmp_path, percentage)


def test_a_missing_file_is_told_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "label.txt").touch()
    message = r"labels\.txt is missing.*did you mean label\.txt\?"
    with pytest.raises(FileNotFoundError, match=message):
        get_labels(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "has no label"),
        (b"a\n\nb\na\n", "has the label 'a' twice"),
        ("犬".encode("shift_jis"), "cannot be read as UTF-8"),
    ],
    ids=["empty", "twice", "shift_jis"],
)
def test_labels_that_name_no_classes_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        get_labels(tmp_path)
