from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_kit.errors import StorageError, UsageError
from trainer_kit.telemetry.history import JsonLinesWriter, active_history
from trainer_kit.telemetry.report import Report


def report(step: int, kind: str = "train", **metrics: Any) -> Report:
    return Report(kind=kind, step=step, total_steps=None, metrics=metrics)


def write(path: Path, *reports: Report, resume: int | None = None) -> None:
    writer = JsonLinesWriter(path)
    if resume is not None:
        writer.resume(resume)
    for item in reports:
        writer.write(item)
    writer.close()


def strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def places(path: Path) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in active_history(path)]


def test_a_line_holds_the_report_with_flat_scalars(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    metrics = {"loss": np.float32(0.5), "digits": {"accuracy": 1}, "image": np.zeros(3)}
    rates = {"steps_per_second": 10.5, "examples_per_second": 336.0, "seconds": 2.0}
    write(path, Report(kind="train", step=np.int64(20), total_steps=40, metrics=metrics, **rates))  # type: ignore[arg-type]
    expected = {"kind": "train", "step": 20, **rates, "metrics": {"loss": 0.5, "digits/accuracy": 1.0}}
    assert strict_lines(path) == [expected]
    assert active_history(path) == [expected]


def test_lines_are_strict_json_also_with_nan_and_infinity(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    item = report(1, a=math.nan, b=math.inf, c=-math.inf, d=np.float32("nan"))
    write(path, Report(kind="train", step=1, total_steps=None, metrics=item.metrics, steps_per_second=math.inf))
    assert strict_lines(path)[0]["metrics"] == {"a": "nan", "b": "inf", "c": "-inf", "d": "nan"}
    record = active_history(path)[0]
    assert record["metrics"]["b"] == math.inf and record["metrics"]["c"] == -math.inf
    assert math.isnan(record["metrics"]["a"])
    assert record["steps_per_second"] == math.inf


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(report(1, loss=1.0))
    assert places(path) == [("train", 1)]
    writer.write(report(2, loss=1.0))
    writer.flush()
    assert places(path) == [("train", 1), ("train", 2)]
    writer.close()
    writer.close()


def test_nothing_is_made_before_the_first_report(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    writer.resume(0)
    writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    assert active_history(tmp_path / "metrics.jsonl") == []


def test_a_resume_supersedes_later_steps_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(100, loss=1.0), report(100, "validation", acc=0.1), report(200, loss=2.0), report(300, loss=3.0))
    write(path, report(300, loss=33.0), report(400, loss=44.0), resume=200)
    history = active_history(path)
    assert places(path) == [("train", 100), ("validation", 100), ("train", 200), ("train", 300), ("train", 400)]
    assert history.get_history("loss") == [(100, 1.0), (200, 2.0), (300, 33.0), (400, 44.0)]


def test_a_start_from_nothing_supersedes_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(100), report(200))
    write(path, report(50), resume=0)
    assert places(path) == [("train", 50)]


def test_a_resume_that_nothing_follows_counts_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(100), report(200))
    write(path, resume=100)
    assert places(path) == [("train", 100)]


def test_an_evaluation_that_is_done_again_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(100), report(100, "validation", acc=0.1))
    write(path, report(100, "validation", acc=0.2), report(200), resume=100)
    assert places(path) == [("train", 100), ("validation", 100), ("train", 200)]
    assert active_history(path).get_latest("acc") == 0.2


def test_an_evaluation_of_an_earlier_checkpoint_takes_nothing_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(100), report(200), report(300), report(200, "validation", acc=0.2))
    assert places(path) == [("train", 100), ("train", 200), ("validation", 200), ("train", 300)]


@pytest.mark.parametrize("seed", range(20))
def test_steps_never_go_back_whatever_was_written(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    expected: dict[tuple[str, int], float] = {}
    for number in range(60):
        kind = ("train", "validation", "resume")[random.integers(3)]
        step = int(random.integers(10))
        if kind in ("train", "resume"):
            expected = {key: value for key, value in expected.items() if key[1] <= step}
        if kind == "resume":
            writer.resume(step)
        else:
            writer.write(report(step, kind, number=number))
            expected[kind, step] = float(number)
    writer.close()
    found = places(path)
    assert len(found) == len(set(found))
    assert [step for _, step in found] == sorted(step for _, step in found)
    records = active_history(path)
    assert {(record["kind"], record["step"]): record["metrics"]["number"] for record in records} == expected


@pytest.mark.parametrize("left", [1, 10, 60])
def test_a_cut_last_line_is_left_out_and_the_next_is_whole(tmp_path: Path, left: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(1, loss=1.0), report(2, loss=2.0))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + left])
    assert places(path) == [("train", 1)]
    write(path, report(2, loss=2.5))
    assert active_history(path).get_history("loss") == [(1, 1.0), (2, 2.5)]


def test_what_is_no_report_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(1, loss=1.0))
    lines: Sequence[Any] = (
        [1],
        {"kind": "train"},
        {"kind": 3, "step": 1},
        {"kind": "train", "step": "2"},
        "text",
        None,
    )
    with open(path, "a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
        stream.write("\0\0\0\n" + '{"kind": "train", "step": 5, "metrics": {"loss": [1], "acc": "inf"}}\n')
    assert places(path) == [("train", 1), ("train", 5)]
    assert math.isnan(active_history(path).get_latest("loss"))
    assert active_history(path).get_latest("acc") == math.inf


def test_a_metric_is_found_by_name_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rates = {"steps_per_second": 7.0, "seconds": 1.5}
    train = Report(kind="train", step=1, total_steps=None, metrics={"loss": 1.0}, **rates)  # type: ignore[arg-type]
    write(path, train, report(1, "validation", loss=3.0, set={"acc": 0.5}))
    history = active_history(path)
    assert history.get_history("loss", kind="train") == [(1, 1.0)]
    assert history.get_latest("loss", kind="validation") == 3.0
    assert history.get_latest("set/acc") == 0.5
    assert history.get_latest("steps_per_second") == 7.0
    with pytest.raises(UsageError, match="set/acc"):
        history.get_latest("set/ac")
    with pytest.raises(UsageError, match="no report has a metric 'loss'"):
        active_history(tmp_path / "none.jsonl").get_history("loss")


def test_a_path_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        JsonLinesWriter(tmp_path / "file" / "metrics.jsonl").write(report(1))


def test_a_line_that_a_full_disk_cut_is_finished_when_there_is_room_again(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.history import JsonLinesWriter
from trainer_kit.telemetry.report import Report
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JsonLinesWriter(sys.argv[1])
for step, room in ((1, -1), (2, 150), (3, -1)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, -1))
    try:
        writer.write(Report(kind="train", step=step, total_steps=None, metrics={}))
    except StorageError:
        print(step)
writer.close()
"""
    path = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", code, os.fspath(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2\n"
    assert places(path) == [("train", 1), ("train", 2), ("train", 3)]


def test_a_full_disk_is_a_storage_error() -> None:
    writer = JsonLinesWriter("/dev/full")
    with pytest.raises(StorageError, match="No space left"):
        writer.write(report(1))
    with pytest.raises(StorageError, match="No space left"):
        writer.close()


def test_a_killed_process_loses_no_line_that_was_written(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from trainer_kit.telemetry.history import JsonLinesWriter
from trainer_kit.telemetry.report import Report
writer = JsonLinesWriter(sys.argv[1])
for step in range(100):
    writer.write(Report(kind="train", step=step, total_steps=None, metrics={}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "metrics.jsonl"
    ended = subprocess.run([sys.executable, "-c", code, os.fspath(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(places(path)) == 100
