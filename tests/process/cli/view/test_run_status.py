"""What the files of a run tell a viewer, whatever state they are in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.process.cli.written_runs import write_ledger, write_params, write_process
from trainer_kit.cli.view.run_status import (
    Process,
    Settings,
    TrainReport,
    open_run,
    read_process,
    read_settings,
    read_status,
)
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.process.run_lock import RunLock
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
from trainer_kit.telemetry.report import Report

_DEFAULTS = Settings(None, "", "higher", "best_ckpt")


def test_a_real_run_is_read_whole(finished_run: Path) -> None:
    state = read_status(open_run(str(finished_run)))
    assert state.settings == Settings(20, "accuracy", "higher", "best_ckpt")
    assert state.trainer is not None and state.report is not None
    assert (state.trainer.pid, state.trainer.step, state.trainer.ended) == (os.getpid(), 20, "done")
    assert state.report.step == 20 and state.report.steps_per_second is not None
    assert {"training_loss", "accuracy"} <= state.report.metrics.keys()
    assert (state.checkpoint, state.finished) == ("ckpt-20", 20)
    assert list(state.sidecars) == ["fast"]


def test_a_run_that_has_only_begun_is_read_as_far_as_it_is_there(tmp_path: Path) -> None:
    with RunLock(tmp_path, lambda: ("start", 0)):
        state = read_status(open_run(str(tmp_path)))
    assert state.trainer is not None and (state.trainer.phase, state.trainer.ended) == ("start", "")
    assert (state.settings, state.report, state.checkpoint, state.finished) == (_DEFAULTS, None, "", None)
    assert state.sidecars == {}


@pytest.mark.parametrize(
    "text",
    ["", "trainer: [1, 2]", "trainer: {train_steps: many, best_checkpoint_metric_comp: better}", "a: [", "- 1", "\xff"],
)
def test_params_that_are_damaged_or_missing_tell_the_defaults(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "params.yaml").write_bytes(text.encode("latin-1"))
    assert read_settings(tmp_path) == _DEFAULTS


def test_params_tell_how_far_the_run_goes_and_what_is_best(tmp_path: Path) -> None:
    best = {"best_checkpoint_eval_metric": "far|loss", "best_checkpoint_metric_comp": "lower"}
    write_params(tmp_path, train_steps=7, best_checkpoint_export_subdir="kept", **best)
    assert read_settings(tmp_path) == Settings(7, "far|loss", "lower", "kept")
    assert read_settings(write_params(tmp_path, train_steps=-1)).train_steps is None


def test_the_manifest_tells_how_many_steps_the_epochs_are(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("trainer: {train_steps: 2 epochs}\n")
    assert read_settings(tmp_path).train_steps is None
    (tmp_path / "manifest.json").write_text('{"train_steps": 22}')
    assert read_settings(tmp_path).train_steps == 22


def test_a_process_tells_what_it_tells(tmp_path: Path) -> None:
    whole = {"host": "a", "pid": 5, "phase": "evaluate", "step": 3, "beat": "b", "ended": "failed"}
    path = write_process(tmp_path / "fast.lease.json", **whole)
    os.utime(path, (50, 50))
    assert read_process(path) == Process("a", 5, "evaluate", 3, "b", "failed", 50.0)
    os.utime(write_process(path), (50, 50))
    assert read_process(path) == Process("", None, "", None, "None", "", 50.0)
    os.utime(write_process(path, host=None, pid="5", step=None, phase=None, beat=8.5, ended=True), (50, 50))
    assert read_process(path) == Process("", None, "", None, "8.5", "done", 50.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"host": "a"', "\xff"])
def test_half_a_heartbeat_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "heartbeat.json"
    assert read_process(path) is None
    path.write_bytes(text.encode("latin-1"))
    assert read_process(path) is None


def test_sidecars_are_found_by_lease_ledger_or_folder(tmp_path: Path) -> None:
    write_process(tmp_path / "evals" / "leased.lease.json", host="a", pid=1, beat=1)
    for name in ("validation", "eval", "told"):
        write_ledger(tmp_path, name=name)
    (tmp_path / "evals" / "begun").mkdir()
    (tmp_path / "evals" / "notes.txt").write_text("mine")
    sidecars = read_status(tmp_path).sidecars
    assert list(sidecars) == ["begun", "leased", "told"]
    assert sidecars["leased"] is not None and sidecars["told"] is None


def test_the_last_report_is_read_from_the_end_of_the_history(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    for step, rate in ((5, 100.0), (10, float("inf"))):
        writer.write(
            Report(kind="train", step=step, total_steps=None, metrics={"loss": 1 / step}, steps_per_second=rate)
        )
        writer.write(Report(kind="validation", step=step, total_steps=None, metrics={"accuracy": 0.5}))
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"kind": "train", "step": 15, "metr')
    assert read_status(tmp_path).report == TrainReport(10, {"loss": 0.1}, None)


def test_foreign_and_damaged_files_are_left_out(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished_run, folder)
    (folder / "final.json").write_text('{"step": "many"}')
    (folder / "metrics.jsonl").write_text("no history\n")
    (folder / "ckpt-99.data-00000-of-00001").write_text("half of a checkpoint")
    (folder / "ckpt-best.index").write_text("not ours")
    state = read_status(folder)
    assert (state.finished, state.report, state.checkpoint) == (None, None, "ckpt-20")


def test_looking_writes_nothing(finished_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")}
    read_status(open_run(str(finished_run)))
    assert {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")} == before


def test_an_empty_folder_is_a_run_only_for_those_who_wait(tmp_path: Path) -> None:
    assert open_run(str(tmp_path), may_be_empty=True) == tmp_path
    with pytest.raises(UsageError, match="holds no run; it holds: nothing"):
        open_run(str(tmp_path))


@pytest.mark.parametrize("may_be_empty", [False, True])
def test_another_folder_is_refused_with_what_is_there(tmp_path: Path, may_be_empty: bool) -> None:
    write_params(tmp_path / "runs" / "digits")
    (tmp_path / "runs" / "other").mkdir()
    cases = {
        "runs": rf"runs holds no run; runs in it: {tmp_path}/runs/digits$",
        "runs/digist": rf"there is no folder .*digist; did you mean {tmp_path}/runs/digits\?$",
        "runs/digits/params.yaml": "params.yaml is a file; give the folder of a run",
        "far/away/run": rf"there is no folder .*; there is no folder {tmp_path}/far/away either$",
    }
    for path, message in cases.items():
        with pytest.raises(UsageError, match=message):
            open_run(str(tmp_path / path), may_be_empty)
    (tmp_path / "runs" / "other" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match=r"other holds no run; it holds: mine\.txt$"):
        open_run(str(tmp_path / "runs" / "other"), may_be_empty)
    with pytest.raises(UsageError, match="is a remote folder; give the path that it is mounted at"):
        open_run("gs://bucket/run", may_be_empty)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    try:
        with pytest.raises(StorageError, match="cannot be read: Permission denied"):
            open_run(str(tmp_path))
    finally:
        tmp_path.chmod(0o700)
