from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import curve, json_lines, report, run_program
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.metrics_jsonl import (
    RESUME,
    WALL_CLOCK_FIELDS,
    JsonLinesWriter,
    has_report,
    read_active_history,
    superseded_path,
)
from trainer_kit.telemetry.report import CHANGE, Report


def write(path: Path, *reports: Report, resume: int | None = None) -> None:
    writer = JsonLinesWriter(path)
    if resume is not None:
        writer.resume(resume)
    for item in reports:
        writer.write(item)
    writer.close()


def list_places(path: Path) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in read_active_history(path)]


def test_a_line_holds_the_report_with_flat_scalars(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    metrics = {"loss": np.float32(0.5), "digits": {"accuracy": 1}, "image": np.zeros(3)}
    rates = {"steps_per_second": 10.5, "examples_per_second": 336.0, "seconds": 2.0}

    write(path, report(np.int64(20), total_steps=40, metrics=metrics, **rates))  # type: ignore[arg-type]
    expected = {
        "kind": "train",
        "step": 20,
        **rates,
        "metrics": {"loss": 0.5, "digits/accuracy": 1.0},
    }

    assert json_lines(path) == [expected]
    assert read_active_history(path) == [expected]


def test_lines_are_strict_json_also_with_nan_and_infinity(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    write(
        path,
        report(
            1, a=math.nan, b=math.inf, c=-math.inf, d=np.float32("nan"), steps_per_second=math.inf
        ),
    )

    assert json_lines(path)[0]["metrics"] == {"a": "nan", "b": "inf", "c": "-inf", "d": "nan"}

    record = read_active_history(path)[0]
    assert record["metrics"]["b"] == math.inf
    assert record["metrics"]["c"] == -math.inf
    assert math.isnan(record["metrics"]["a"])
    assert record["steps_per_second"] == math.inf


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)

    writer.write(report(1, loss=1.0))

    assert list_places(path) == [("train", 1)]

    writer.write(report(2, loss=1.0))

    writer.flush()

    assert list_places(path) == [("train", 1), ("train", 2)]

    writer.close()
    writer.close()


def test_nothing_is_made_before_the_first_report(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")

    writer.resume(0)
    writer.flush()
    writer.close()

    assert list(tmp_path.iterdir()) == []
    assert read_active_history(tmp_path / "metrics.jsonl") == []


def test_a_change_is_written_again_only_with_other_values(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    write(path, report(5), report(5, CHANGE, learning_rate=0.1))
    write(
        path, report(5, CHANGE, learning_rate=0.1), report(5, CHANGE, learning_rate=0.2), resume=5
    )

    assert [line["metrics"] for line in json_lines(path)] == [
        {},
        {"learning_rate": 0.1},
        {"learning_rate": 0.2},
    ]
    assert curve(path, "learning_rate") == [(5, 0.2)]


def test_changes_at_one_step_count_each(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    both = report(5, CHANGE, learning_rate=0.1, weight=1.0)  # as earlier versions wrote them

    write(path, both, report(5, CHANGE, weight=1.0))
    write(path, report(6, CHANGE, weight=2.0), report(6, CHANGE, learning_rate=3.0))

    assert [line["metrics"] for line in json_lines(path)] == [
        {"learning_rate": 0.1, "weight": 1.0},
        {"weight": 2.0},
        {"learning_rate": 3.0},
    ]
    assert curve(path, "learning_rate") == [(5, 0.1), (6, 3.0)]
    assert curve(path, "weight")[-1][1] == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_steps_never_go_back_whatever_was_written(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    expected: dict[tuple[str, int], float] = {}
    for number in range(60):
        kind = ("train", "validation", "resume")[random.integers(3)]
        step = int(random.integers(10))
        goes_back = kind == "train" and any(step < written for _, written in expected)
        if kind == "resume" or goes_back:
            staying = step - 1 if goes_back else step
            expected = {key: value for key, value in expected.items() if key[1] <= staying}
        if kind == "resume":
            writer.resume(step)
        else:
            writer.write(report(step, kind, number=number))
            expected.setdefault((kind, step), float(number))

    writer.close()
    pairs = list_places(path)

    assert len(pairs) == len(set(pairs))
    assert [step for _, step in pairs] == sorted(step for _, step in pairs)

    records = read_active_history(path)
    assert pairs == list_steps(json_lines(path))
    assert {
        (record["kind"], record["step"]): record["metrics"]["number"] for record in records
    } == expected


def test_what_is_no_report_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(1, loss=1.0))
    lines = [
        [1],
        {"kind": "train"},
        {"kind": 3, "step": 1},
        {"kind": "train", "step": "2"},
        "text",
        None,
    ]

    with open(path, "a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
        stream.write(
            "\0\0\0\n" + '{"kind": "train", "step": 5, "metrics": {"loss": [1], "acc": "inf"}}\n'
        )

    assert list_places(path) == [("train", 1), ("train", 5)]
    assert math.isnan(curve(path, "loss")[-1][1])
    assert curve(path, "acc")[-1][1] == math.inf


def test_a_metric_is_found_by_name_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train = report(1, loss=1.0, steps_per_second=7.0, seconds=1.5)

    write(path, train, report(1, "validation", loss=3.0, set={"acc": 0.5}))

    assert curve(path, "loss", "train") == [(1, 1.0)]
    assert curve(path, "loss", "validation")[-1][1] == 3.0
    assert curve(path, "set/acc")[-1][1] == 0.5
    assert curve(path, "steps_per_second")[-1][1] == 7.0


@pytest.mark.parametrize("path", ["/dev/full", "{}/file/metrics.jsonl"])
def test_a_path_that_cannot_be_written_is_a_storage_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        JsonLinesWriter(path.format(tmp_path)).write(report(1))


def test_a_line_cut_by_a_full_disk_is_ended_once_there_is_space(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
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

    assert run_program(code, path).stdout == "2\n"
    assert list_places(path) == [("train", 1), ("train", 2), ("train", 3)]


def read_superseded(path: Path) -> list[dict[str, Any]]:
    return json_lines(Path(superseded_path(path)))


def list_steps(lines: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in lines]


def test_what_is_superseded_is_kept_in_a_file_beside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    write(path, report(100), report(200), report(200, "validation", acc=0.5), report(300))
    write(path, report(200, loss=7.0), report(300), resume=100)
    write(path, resume=200)

    assert superseded_path(path) == str(tmp_path / "metrics.superseded.jsonl")
    assert list_steps(json_lines(path)) == [("train", 100), ("train", 200)]

    lines = read_superseded(path)
    assert list_steps(lines) == [
        *(("resume", 100), ("train", 200), ("validation", 200), ("train", 300)),
        *(("resume", 200), ("train", 300)),
    ]
    assert lines[0] == {"kind": "resume", "step": 100, "superseded": 3}
    assert lines[2]["metrics"] == {"acc": 0.5}


def test_a_resume_at_the_newest_step_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(100), report(100, "validation"))
    before = (path.stat().st_ino, path.stat().st_mtime_ns)

    write(path, resume=100)
    write(path, resume=5000)

    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_an_empty_file_is_a_history_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    path.touch()

    assert not has_report(path, "train", 1)

    write(path, report(1), resume=0)

    assert list_places(path) == [("train", 1)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_cut_last_line_is_moved_too(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(1), report(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + cut])

    write(path, resume=1)

    assert path.read_bytes() == whole[:first]

    mark, torn = Path(superseded_path(path)).read_bytes().splitlines()
    assert json.loads(mark) == {"kind": "resume", "step": 1, "superseded": 1}
    assert torn == whole[first : first + cut]


def test_bytes_that_a_power_failure_left_do_not_stop_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(1))
    with open(path, "ab") as stream:
        stream.write(b"\xff\0\n\xfe")

    write(path, report(2), resume=1)
    write(path, resume=1)

    assert list_places(path) == [("train", 1)]
    assert len(Path(superseded_path(path)).read_bytes().splitlines()) == 4


OLD = [
    ("train", 1),
    ("validation", 1),
    ("train", 2),
    ("train", 3),
    ("resume", 1),
    ("validation", 1),
    ("train", 2),
]


def write_old(path: Path, lines: Sequence[tuple[str, int]]) -> None:
    """Writes what earlier versions wrote. The metric of a line is its place."""
    with open(path, "w") as stream:
        for number, (kind, step) in enumerate(lines):
            metrics = {} if kind == RESUME else {"metrics": {"number": number}}
            stream.write(json.dumps({"kind": kind, "step": step, **metrics}) + "\n")


def test_an_old_file_is_read_as_it_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    write_old(path, OLD)

    assert curve(path, "number") == [(1, 0.0), (1, 5.0), (2, 6.0)]
    assert has_report(path, "train", 2)
    assert has_report(path, "validation", 1)
    assert not has_report(path, "train", 3)

    write_old(
        path,
        [("train", 1), ("train", 2), ("validation", 2), ("resume", 1), ("train", 2), ("train", 3)],
    )

    assert not has_report(path, "validation", 2)


def test_the_next_resume_brings_an_old_file_to_the_new_form(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    write_old(path, OLD)
    write(path, report(3), resume=2)

    assert list_steps(json_lines(path)) == [
        ("train", 1),
        ("validation", 1),
        ("train", 2),
        ("train", 3),
    ]
    assert [line["metrics"].get("number") for line in json_lines(path)] == [0, 5, 6, None]

    moved = [("resume", 2), ("validation", 1), ("train", 2), ("train", 3), ("resume", 1)]
    assert list_steps(read_superseded(path)) == moved


def test_reported_knows_kind_and_step_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    assert not has_report(path, "train", 1)

    write(path, report(20), report(20, "validation"), report(200))

    assert has_report(path, "train", 20)
    assert has_report(path, "validation", 20)
    assert has_report(path, "train", 200)

    for kind, step in (("train", 2), ("validation", 200), ("trai", 20), ("train", 0)):
        assert not has_report(path, kind, step)

    with open(path, "a") as stream:
        stream.write('{"kind": "train", "step": 300, "metr')

    assert not has_report(path, "train", 300)


def test_the_fields_that_depend_on_the_clock_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    write(path, report(1))
    (line,) = json_lines(path)

    assert set(line) - set(WALL_CLOCK_FIELDS) == {"kind", "step", "metrics"}
    assert set(WALL_CLOCK_FIELDS) < set(line)


def test_a_line_has_what_is_known_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    write(path, report(1, flops_utilization=0.25, peak_memory_bytes=2**33))
    (line,) = json_lines(path)

    assert (line["flops_utilization"], line["peak_memory_bytes"]) == (0.25, 2**33)
    assert "tokens_per_second" not in line


KILLED_IN_A_RESUME = """
import os, signal, sys
from trainer_kit import files
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter

def kill(point, path):
    if point == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

files.on_write_point = kill
JsonLinesWriter(sys.argv[1]).resume(2)
"""


@pytest.mark.parametrize(
    "point", ["history.supersede", "history.open", "history.flush", "history.rename"]
)
def test_a_kill_within_a_resume_loses_no_line(tmp_path: Path, point: str) -> None:
    path = tmp_path / "metrics.jsonl"

    write(path, *(report(step) for step in (1, 2, 3, 4)))
    before = path.read_bytes()

    assert run_program(KILLED_IN_A_RESUME, path, point).returncode == -signal.SIGKILL
    assert path.read_bytes() == before

    write(path, report(3), report(4), resume=2)

    assert (
        list_places(path)
        == [("train", step) for step in (1, 2, 3, 4)]
        == list_steps(json_lines(path))
    )

    batch = [("resume", 2), ("train", 3), ("train", 4)]
    assert list_steps(read_superseded(path)) == batch * (1 if point == "history.supersede" else 2)


def test_an_unwritable_path_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, report(1), report(2))
    before = path.read_bytes()
    os.mkdir(superseded_path(path))

    with pytest.raises(StorageError):
        JsonLinesWriter(path).resume(1)

    assert path.read_bytes() == before


def test_a_resume_near_the_end_of_a_long_run_moves_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as stream:
        stream.writelines(
            f'{{"kind": "train", "step": {step}, "metrics": {{}}}}\n' for step in range(20_000)
        )

    JsonLinesWriter(path).resume(19_000)

    assert len(read_superseded(path)) == 1 + 999
    assert list_places(path)[-1] == ("train", 19_000)


EVAL_INTERVAL = 3
SAVE_INTERVAL = 2


def run(path: Path, end: int, start: int = 0, *, attempt: int = 0) -> dict[int, int]:
    """A run as the history sees it, from the checkpoint of step `start`; returns the file's size at
    each checkpoint.

    Each step is reported, then saved every SAVE_INTERVAL, then evaluated every EVAL_INTERVAL, as a
    Controller does. An evaluation that was due and has no line is made up at the start.
    """
    writer = JsonLinesWriter(path)
    sizes = {}
    writer.resume(start)
    for step in range(start, end + 1):
        if step > start:
            writer.write(report(step, total_steps=end, loss=1 / step, seconds=attempt))
            if step % SAVE_INTERVAL == 0:
                sizes[step] = path.stat().st_size
        due = step > 0 and step % EVAL_INTERVAL == 0
        if due and (step > start or not has_report(path, "validation", step)):
            writer.write(report(step, "validation", total_steps=end, acc=step, seconds=attempt))
    writer.close()
    return sizes


def read_without_times(path: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in WALL_CLOCK_FIELDS}
        for line in json_lines(path)
    ]


@settings(deadline=None, max_examples=60)
@given(
    end=st.integers(1, 12),
    kills=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2)), max_size=4),
)
def test_a_killed_runs_history_equals_that_of_one_never_killed(
    tmp_path_factory: pytest.TempPathFactory, end: int, kills: list[tuple[float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("kills")
    run(folder / "whole.jsonl", end)
    path = folder / "metrics.jsonl"
    checkpoints = {0: 0}
    checkpoints |= run(path, end)

    for attempt, (share, older) in enumerate(kills, start=1):
        # The file is cut at any byte. Checkpoints are those that were saved by then; the newest may
        # be damaged.
        size = int(share * path.stat().st_size)
        os.truncate(path, size)
        checkpoints = {step: length for step, length in checkpoints.items() if length <= size}
        start = sorted(checkpoints)[-1 - min(older, len(checkpoints) - 1)]
        checkpoints = {step: length for step, length in checkpoints.items() if step <= start}
        checkpoints |= run(path, end, start, attempt=attempt)

    assert read_without_times(path) == read_without_times(folder / "whole.jsonl")
