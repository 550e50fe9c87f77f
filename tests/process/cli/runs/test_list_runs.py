"""`trainer-kit runs`, as a user runs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.process.cli.written_runs import evaluation, write_ledger, write_params, write_process
from trainer_kit.cli.main import main

Output = pytest.CaptureFixture[str]


def test_each_folder_is_a_row_that_says_what_it_is(capsys: Output, tmp_path: Path) -> None:
    alive = {"host": os.uname().nodename, "pid": os.getpid(), "phase": "train", "step": 30}
    times = {"started": "2026-01-01T00:00:00+00:00", "beat": "2026-01-01T00:00:00+00:00"}
    write_params(tmp_path / "alive", best_checkpoint_eval_metric="accuracy")
    write_process(tmp_path / "alive" / "manifest.json", train_steps=60)
    write_process(tmp_path / "alive" / "heartbeat.json", **alive, **times, ended=None)
    write_ledger(tmp_path / "alive", evaluation(10, accuracy=0.5), evaluation(20, accuracy=0.75))
    write_process(tmp_path / "b" / "done" / "final.json", step=60, stopped="no progress")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "params.yaml").write_text("trainer: [")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()

    assert main(["runs", str(tmp_path)]) == 0

    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == f"runs in {tmp_path}"
    columns = "run state step best steps/s last sign of life"
    assert header.split() == columns.split()
    cells = [row.split() for row in rows]
    assert cells[0][:5] == ["alive", "running", "30/60", "accuracy", "0.75"]
    assert cells[1][:4] == ["b/done", "stopped", "early", "60"]
    assert cells[2][:3] == ["cut", "unknown,", "damaged"]
    assert cells[3][:2] == ["empty", "empty"]
    assert cells[4][:4] == ["foreign", "not", "a", "run"]
    assert rows[5:] == [
        "b/done: it has no config (params.yaml); no progress",
        "cut: params.yaml is damaged",
    ]


def test_a_run_is_a_row_and_an_empty_folder_says_so(capsys: Output, tmp_path: Path) -> None:
    write_params(tmp_path / "run")
    (tmp_path / "empty").mkdir()

    assert main(["runs", str(tmp_path / "run")]) == 0
    assert f"\n{tmp_path}/run  unknown " in capsys.readouterr().out

    assert main(["runs", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/empty contains no run yet\n"


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("gs://bucket/runs", "FOLDER: 'gs://bucket/runs' is a remote folder"),
        ("rusn", "FOLDER: there is no folder rusn; did you mean runs?"),
        ("runs/params.yaml", "FOLDER: runs/params.yaml is a file; give a folder"),
    ],
)
def test_another_folder_is_one_message(
    folder: str,
    message: str,
    capsys: Output,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_params(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["runs", folder]) == 2
    assert f"error: {message}" in capsys.readouterr().err
