"""Faults at write points: in a process that dies of them, and as a full disk."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from trainer_kit import files
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.testing import WRITE_POINTS, record_points, stop_at


@pytest.fixture(autouse=True)
def no_fault_is_left() -> Iterator[None]:
    """Takes faults back."""
    yield
    files.on_write_point = None


def write_until_killed(path: str, point: str, occurrence: int) -> None:
    """Writes one file three times, in a process that dies at one of them."""
    stop_at(point, occurrence)
    with record_points(f"{path}.points"):
        for number in (1, 2, 3):
            files.write_text(path, str(number), point="final")


@pytest.mark.parametrize(("occurrence", "left"), [(1, None), (2, "1"), (3, "2")])
def test_the_process_dies_at_the_asked_occurrence_of_the_point(
    tmp_path: Path, occurrence: int, left: str | None
) -> None:
    path = tmp_path / "a.txt"
    with ForkServer() as server:
        end = server.run(write_until_killed, str(path), "final.rename", occurrence)

    assert end.code == -signal.SIGKILL
    assert end.text == ""
    assert (path.read_text() if path.exists() else None) == left
    points = ["final.open", "final.flush", "final.rename"] * occurrence
    assert Path(f"{path}.points").read_text().split() == points


def test_a_full_disk_is_met_once_and_told_as_one(tmp_path: Path) -> None:
    stop_at("final.flush", occurrence=2, how="raise")
    files.write_text(tmp_path / "a.txt", "1", point="final")

    with pytest.raises(StorageError, match=r"a\.txt cannot be written: No space left on device"):
        files.write_text(tmp_path / "a.txt", "2", point="final")
    assert (tmp_path / "a.txt").read_text() == "1"

    files.write_text(tmp_path / "a.txt", "3", point="final")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_recorded_points_come_in_order_and_end_with_the_block(tmp_path: Path) -> None:
    with record_points() as points:
        files.append_json_line(tmp_path / "a.jsonl", {}, point="ledger")
        files.write_text(tmp_path / "a.txt", "1", point="params")
    files.write_text(tmp_path / "a.txt", "2", point="params")
    assert points == ["ledger.append", "params.open", "params.flush", "params.rename"]


def test_an_unknown_write_point_is_refused_with_near_names() -> None:
    message = r"no write point 'ledger\.apend'; did you mean ledger\.append"
    with pytest.raises(UsageError, match=message):
        stop_at("ledger.apend")
    with pytest.raises(UsageError, match="occurrence is 0"):
        stop_at("ledger.append", 0)
    assert files.on_write_point is None
    assert len(set(WRITE_POINTS)) == len(WRITE_POINTS)
