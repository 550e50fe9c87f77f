"""What the files of a run tell, whatever state they are in."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.process.cli.written_runs import evaluation, write_ledger, write_params, write_process
from trainer_kit.evals.run_summary import (
    Point,
    RunSummary,
    find_best,
    find_runs,
    flatten_config,
    read_run,
)

_HERE = os.uname().nodename


def _write_heartbeat(folder: Path, **fields: Any) -> Path:
    heartbeat = {
        "host": _HERE,
        "pid": os.getpid(),
        "started": "2026-01-01T00:00:00+00:00",
        "step": 7,
        "phase": "train",
        "beat": "2026-01-01T01:00:00+00:00",
        "ended": None,
    }
    return write_process(folder / "heartbeat.json", **{**heartbeat, **fields})


def _write_reports(folder: Path, *reports: dict[str, Any]) -> None:
    lines = [json.dumps({"kind": "train", **report}) + "\n" for report in reports]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_the_state_comes_from_heartbeat_and_final_record(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    heartbeats: dict[str, dict[str, Any]] = {
        "running": {},
        "starting": {"phase": "start"},
        "waiting": {"phase": "wait"},
        "killed": {"pid": dead.pid},
        "stopped": {"ended": "stopped"},
        "failed": {"ended": "failed"},
        "finished": {"ended": "done"},
        "stopped early": {"ended": "done"},
        "silent": {"host": "far", "pid": dead.pid},
    }
    for state, fields in heartbeats.items():
        path = _write_heartbeat(tmp_path / state, **fields)
        if state == "silent":
            hour_ago = time.time() - 3600
            os.utime(path, (hour_ago, hour_ago))
    write_process(tmp_path / "failed" / "diverged" / "step-9.json")
    write_process(tmp_path / "stopped early" / "final.json", step=7, stopped="no progress")
    (tmp_path / "empty").mkdir()
    (tmp_path / "not a run").mkdir()
    (tmp_path / "not a run" / "notes.txt").touch()
    write_params(tmp_path / "unknown")

    summaries = {path.name: read_run(path) for path in tmp_path.iterdir()}

    assert {name: summary.state for name, summary in summaries.items()} == {
        name: name for name in summaries
    }
    assert summaries["stopped early"].remarks[-1] == "no progress"
    assert "it has diverged; the reports" in summaries["failed"].remarks[-1]
    assert summaries["empty"].step is None
    assert summaries["unknown"].step is None
    assert summaries["running"].updated is not None


def test_values_come_from_the_files_of_the_run(tmp_path: Path) -> None:
    write_params(
        tmp_path,
        train_steps="3 epochs",
        best_checkpoint_eval_metric="loss",
        best_checkpoint_metric_comp="lower",
    )
    manifest = {"experiment": "rings", "train_steps": 60, "packages": {"trainer_kit": "0.0.1"}}
    write_process(tmp_path / "manifest.json", **manifest)
    _write_heartbeat(tmp_path, step=20)
    rewind = json.dumps({"kind": "rewind", "lineage": 1, "step": 10}) + "\n"
    records = [evaluation(10, loss=0.5), evaluation(20, loss=0.1), rewind]
    write_ledger(tmp_path, *records, evaluation(20, lineage=1, loss="nan"))
    write_ledger(tmp_path, evaluation(5, loss=0.0), name="a_sidecar")
    rates = {"steps_per_second": 2.5, "examples_per_second": None}
    _write_reports(
        tmp_path,
        {"step": 10, "metrics": {"training_loss": 3.0}, **rates},
        {"step": 30, "metrics": {"training_loss": 2.0}, **rates},
    )

    run = read_run(tmp_path)

    assert (run.step, run.total_steps, run.steps_per_second) == (30, 60, 2.5)
    assert run.config["experiment"] == "rings"
    assert run.config["trainer.train_steps"] == "3 epochs"
    first, last = run.read_curve("loss")
    assert first == Point(10, 0.5)
    assert last.step == 20
    assert math.isnan(last.value)
    assert find_best(run.read_curve(run.metric), run.comparison) == Point(10, 0.5)
    assert run.read_curve("training_loss") == [Point(10, 3.0), Point(30, 2.0)]
    assert (run.damage, run.remarks) == ([], ["written by trainer_kit 0.0.1"])


@pytest.mark.parametrize(
    ("own_choice", "records", "choice"),
    [
        ({"best_checkpoint_eval_metric": "f1"}, [evaluation(1, f1=0.5)], ("f1", "higher")),
        ({}, [evaluation(1, f1=0.5, validation_loss=1.0)], ("validation_loss", "lower")),
        ({}, [], ("training_loss", "lower")),
        ({"best_checkpoint_eval_metric": ["f1"]}, [], ("training_loss", "lower")),
        ({"best_checkpoint_eval_metric": 5}, [], ("training_loss", "lower")),
        (
            {"best_checkpoint_eval_metric": "f1", "best_checkpoint_metric_comp": ["higher"]},
            [evaluation(1, f1=0.5)],
            ("training_loss", "lower"),
        ),
    ],
)
def test_a_run_that_keeps_no_best_has_a_metric(
    tmp_path: Path, own_choice: Any, records: Any, choice: tuple[str, str]
) -> None:
    write_ledger(write_params(tmp_path, **own_choice), *records)
    run = read_run(tmp_path)
    assert (run.metric, run.comparison) == choice


def _read_all(folder: Path) -> RunSummary:
    run = read_run(folder)
    run.read_curve(run.metric)
    run.read_curve("training_loss")
    return run


@pytest.mark.parametrize("text", ["{", "[]", "\xff\x00"])
def test_damaged_files_are_named_and_never_raise(tmp_path: Path, text: str) -> None:
    names = ("manifest.json", "final.json", "heartbeat.json", "params.yaml", "metrics.jsonl")
    for name in names:
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    write_ledger(tmp_path, evaluation(10, loss=0.5), text)

    run = _read_all(tmp_path)

    assert run.evaluations == {"loss": [Point(10, 0.5)]}
    for name in ("manifest.json", "final.json", "heartbeat.json", "params.yaml"):
        assert f"{name} is damaged" in run.damage


def test_a_ledger_without_a_readable_line_is_damaged(tmp_path: Path) -> None:
    write_ledger(write_params(tmp_path), "\x00")
    assert read_run(tmp_path).damage == ["evals/validation.jsonl has no readable line"]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("manifest.json", {"packages": []}),
        ("params.yaml", {"trainer": ""}),
        ("final.json", {"step": {}}),
    ],
)
def test_files_of_another_program_are_a_row(tmp_path: Path, name: str, record: Any) -> None:
    write_params(tmp_path)
    (tmp_path / name).write_text(json.dumps(record))

    run = _read_all(tmp_path)

    assert run.state == "unknown"
    (damage,) = run.damage
    assert damage.startswith("its files cannot be read (")


def test_a_refused_start_leaves_a_finished_run_finished(tmp_path: Path) -> None:
    write_process(tmp_path / "final.json", step=7)

    _write_heartbeat(tmp_path, ended="failed", phase="start")
    assert read_run(tmp_path).state == "finished"

    _write_heartbeat(tmp_path, ended="failed", phase="train")
    assert read_run(tmp_path).state == "failed"


def test_a_run_that_is_cut_anywhere_is_read(tmp_path: Path) -> None:
    write_params(tmp_path, train_steps=60, best_checkpoint_eval_metric="loss")
    write_process(tmp_path / "manifest.json", experiment="rings", packages={"numpy": "2"})
    write_process(tmp_path / "final.json", step=60, stopped="enough")
    _write_heartbeat(tmp_path, ended="failed")
    write_ledger(tmp_path, evaluation(10, loss=0.5), evaluation(20, loss=0.4))
    _write_reports(tmp_path, {"step": 60, "metrics": {"training_loss": 1.0}})

    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for length in range(0, len(content), 7):
            path.write_bytes(content[:length])
            _read_all(tmp_path)
        path.write_bytes(content)

    assert _read_all(tmp_path).damage == []


@pytest.mark.parametrize("name", ["params.yaml", "heartbeat.json", "evals/a.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    assert len(_read_all(tmp_path).damage) == 1


def test_a_folder_in_the_place_of_the_history_is_no_curve(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert read_run(tmp_path).read_curve("training_loss") == ()


def test_runs_are_found_at_any_depth_but_not_within_runs(tmp_path: Path) -> None:
    for name in ("b/run", "a", "a/finetune-5", ".trash/old"):
        write_params(tmp_path / name)
    assert list(find_runs(tmp_path)) == [tmp_path / "a", tmp_path / "b" / "run"]
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]


def test_a_section_differs_from_null() -> None:
    assert flatten_config({"a": {"b": 1, "c": {}}}) == {"a": "(set)", "a.b": 1, "a.c": {}}
    assert flatten_config({"a": None}) == {"a": None}
