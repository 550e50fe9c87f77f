"""Goodput of runs whose files were written by hand."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.builders import report
from trainer_kit.process.run_lock import HEARTBEAT
from trainer_kit.telemetry.goodput import read_goodput
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter


def _attempt(begin: int, end: int, ended: str | None) -> dict[str, Any]:
    """An attempt from one second of an hour to another."""
    minutes = f"2026-11-28T10:{begin // 60:02}:{begin % 60:02}+00:00"
    last = f"2026-11-28T10:{end // 60:02}:{end % 60:02}+00:00"
    return {"started": minutes, "beat": last, "ended": ended}


def _write_heartbeat(folder: Path, *attempts: dict[str, Any]) -> None:
    *earlier, last = attempts
    process = {"host": "a", "pid": 5, "step": 0, "phase": "train"}
    heartbeat = {**process, **last, "earlier": earlier}
    (folder / HEARTBEAT).write_text(json.dumps(heartbeat))


def _write_loops(folder: Path, first: int, last: int) -> JsonLinesWriter:
    """Loops of 10 steps, each of which took 2 seconds."""
    writer = JsonLinesWriter(folder / "metrics.jsonl")
    for step in range(first, last + 1, 10):
        writer.write(report(step, steps_per_second=5.0, seconds=2.0))
    return writer


def test_the_goodput_of_a_killed_run_is_as_by_hand(tmp_path: Path) -> None:
    # It was killed after 100 s at step 40, and went on from step 20 after 30 s.
    _write_loops(tmp_path, 10, 40).resume(20)
    _write_loops(tmp_path, 30, 60).close()
    _write_heartbeat(tmp_path, _attempt(0, 100, None), _attempt(130, 200, "done"))

    goodput = read_goodput(tmp_path)

    assert goodput is not None
    assert (goodput.attempts, goodput.steps, goodput.lost_steps) == (2, 60, 20)
    assert (goodput.seconds, goodput.training_seconds) == (200.0, 12.0)
    assert (goodput.lost_seconds, goodput.waiting_seconds) == (4.0, 30.0)
    assert goodput.share == pytest.approx(12 / 200)
    assert str(goodput) == (
        "goodput: 6 % of 200.0 s trained the 60 steps that count; 2 attempts, 20 steps trained"
        " again (4.0 s), 30.0 s between attempts"
    )


def test_the_goodput_leaves_out_the_time_after_a_finished_run(tmp_path: Path) -> None:
    _write_loops(tmp_path, 10, 40).close()
    _write_heartbeat(tmp_path, _attempt(0, 50, "done"), _attempt(1000, 1050, "done"))

    goodput = read_goodput(tmp_path)

    assert goodput is not None
    assert (goodput.seconds, goodput.waiting_seconds) == (100.0, 0.0)


def test_the_goodput_of_a_living_run_counts_until_now(tmp_path: Path) -> None:
    _write_loops(tmp_path, 10, 10).close()
    _write_heartbeat(tmp_path, _attempt(0, 15, None))

    goodput = read_goodput(tmp_path, datetime(2026, 11, 28, 10, 0, 20, tzinfo=UTC))

    assert goodput is not None
    assert goodput.seconds == 20.0
    assert goodput.share == pytest.approx(0.1)


def test_a_folder_without_a_heartbeat_has_no_goodput(tmp_path: Path) -> None:
    assert read_goodput(tmp_path) is None


def test_lines_that_a_kill_has_doubled_count_once(tmp_path: Path) -> None:
    _write_loops(tmp_path, 10, 40).resume(20)
    lost_lines = tmp_path / "metrics.superseded.jsonl"
    lines = lost_lines.read_text()
    lost_lines.write_text(lines + lines)
    _write_heartbeat(tmp_path, _attempt(0, 100, None), _attempt(130, 200, "done"))

    goodput = read_goodput(tmp_path)

    assert goodput is not None
    assert (goodput.lost_steps, goodput.lost_seconds) == (20, 4.0)


def test_a_clock_that_went_back_is_no_wait(tmp_path: Path) -> None:
    _write_heartbeat(tmp_path, _attempt(50, 100, None), _attempt(90, 200, "done"))

    goodput = read_goodput(tmp_path)

    assert goodput is not None
    assert goodput.waiting_seconds == 0.0


@pytest.mark.parametrize(
    "damage", [{"beat": "yesterday"}, {"started": "2026-11-28T10:00:00"}, {"earlier": [{}]}]
)
def test_a_damaged_heartbeat_has_no_goodput(damage: dict[str, Any], tmp_path: Path) -> None:
    attempt = _attempt(0, 100, "done")
    process = {"host": "a", "pid": 5, "step": 0, "phase": "train"}
    heartbeat = {**process, **attempt, **damage}
    (tmp_path / HEARTBEAT).write_text(json.dumps(heartbeat))

    assert read_goodput(tmp_path) is None
