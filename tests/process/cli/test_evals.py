"""`trainer-kit evals`, as a user runs it."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import json_lines
from tests.process.cli.written_runs import evaluation, write_ledger, write_params
from trainer_kit.cli.main import main
from trainer_kit.evals.ledger import Ledger

Command = Callable[..., subprocess.CompletedProcess[str]]
Output = pytest.CaptureFixture[str]


def _read_table(capsys: Output, *arguments: str) -> list[list[str]]:
    assert main(["evals", *arguments]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_real_run_shows_a_table_for_each_ledger(trainer_kit: Command, finished_run: Path) -> None:
    done = trainer_kit("evals", str(finished_run))
    assert (done.returncode, done.stderr) == (0, "")

    first, second = done.stdout.split("\n\n")
    title, header, *rows = first.splitlines()

    assert title == "validation: 2 evaluations, best by accuracy (higher)"
    assert header.split()[:2] == ["step", "dataset"]
    assert header.split()[-3:] == ["seconds", "checkpoint", "mark"]

    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == ["10", "20"]
    assert [row[-2:] for row in cells] == [["ckpt-10", "-"], ["ckpt-20", "best"]]
    assert second.startswith("fast: 2 evaluations")
    assert trainer_kit("evals", str(finished_run), "--name=fast").stdout == second


def test_json_has_all_digits_and_is_strict(capsys: Output, finished_run: Path) -> None:
    assert main(["evals", str(finished_run), "--json", "--name=validation"]) == 0
    (shown,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    assert shown["name"] == "validation"
    assert shown["metric"] == "accuracy"
    assert shown["comparison"] == "higher"
    records = json_lines(finished_run / "evals" / "validation.jsonl")
    metrics = [evaluation["metrics"] for evaluation in shown["evaluations"]]
    assert metrics == [record["metrics"] for record in records]
    assert [evaluation["best"] for evaluation in shown["evaluations"]] == [False, True]


def test_superseded_evaluations_are_shown_when_asked_for(capsys: Output, tmp_path: Path) -> None:
    write_params(tmp_path, best_checkpoint_eval_metric="accuracy")
    ledger = Ledger(tmp_path / "evals" / "validation.jsonl", dataset="validation", config_hash="0")
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.8)):
        ledger.append(step, {"accuracy": accuracy}, 1.0)
    ledger.rewind(10)
    ledger.append(20, {"accuracy": 0.6}, 1.0)

    _, _, *rows = _read_table(capsys, str(tmp_path))
    active = [("10", "0.5", "-"), ("20", "0.6", "best")]
    assert [(row[0], row[2], row[-1]) for row in rows] == active

    _, _, *rows = _read_table(capsys, str(tmp_path), "--all")
    superseded = [("20", "0.9", "superseded"), ("30", "0.8", "superseded")]
    assert sorted((row[0], row[2], row[-1]) for row in rows) == sorted([*active, *superseded])


def test_nested_metrics_nan_and_missing_ones_have_their_cells(
    capsys: Output, tmp_path: Path
) -> None:
    write_params(tmp_path)
    write_ledger(
        tmp_path, evaluation(1, far={"loss": math.nan}), evaluation(2, near=1.5), '{"step": 3, "met'
    )

    title, header, *rows = _read_table(capsys, str(tmp_path))
    assert title == ["validation:", "2", "evaluations"]
    assert header == ["step", "dataset", "far|loss", "near", "seconds", "checkpoint", "mark"]
    assert rows == [
        ["1", "validation", "nan", "-", "0.5", "gone", "-"],
        ["2", "validation", "-", "1.5", "0.5", "gone", "-"],
    ]

    assert main(["evals", str(tmp_path), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["evaluations"][0]["metrics"] == {"far|loss": "nan"}


def test_another_metric_or_comparison_may_decide(capsys: Output, tmp_path: Path) -> None:
    write_params(tmp_path, best_checkpoint_eval_metric="accuracy")
    write_ledger(
        tmp_path, evaluation(1, accuracy=0.5, loss=1.0), evaluation(2, accuracy=0.6, loss=2.0)
    )

    title, _, *rows = _read_table(capsys, str(tmp_path), "--metric=loss", "--comparison=lower")
    assert title == ["validation:", "2", "evaluations,", "best", "by", "loss", "(lower)"]
    assert [row[-1] for row in rows] == ["best", "-"]

    _, _, *rows = _read_table(capsys, str(tmp_path))
    assert [row[-1] for row in rows] == ["-", "best"]

    _, _, *rows = _read_table(capsys, str(tmp_path), "--comparison=lower")
    assert [row[-1] for row in rows] == ["best", "-"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}s"], "error: MODEL_DIR: there is no folder"),
        (["gs://bucket/run"], "is a remote folder; give the path that it is mounted at"),
        (["{run}", "--name=fats"], "evals has no ledger 'fats'; did you mean fast?"),
        (["{run}/train"], "train holds no run; it holds: events.out"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(
    capsys: Output, finished_run: Path, arguments: list[str], message: str
) -> None:
    assert main(["evals", *(argument.format(run=finished_run) for argument in arguments)]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_run_without_evaluations_says_what_it_holds(capsys: Output, tmp_path: Path) -> None:
    write_params(tmp_path)
    assert main(["evals", str(tmp_path)]) == 2

    message = "has no evaluations (evals/<name>.jsonl); it holds: params.yaml"
    assert message in capsys.readouterr().err
