"""`trainer-kit best`, as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import read_json
from tests.process.cli.written_runs import evaluation, write_ledger, write_params
from trainer_kit.cli.main import main

Command = Callable[..., subprocess.CompletedProcess[str]]
Output = pytest.CaptureFixture[str]


def _read_best(capsys: Output, *arguments: str) -> Any:
    assert main(["best", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_best_of_a_real_run_is_what_info_json_names(
    trainer_kit: Command, finished_run: Path
) -> None:
    info = read_json(finished_run / "best_ckpt" / "info.json")

    done = trainer_kit("best", str(finished_run))

    assert (done.returncode, done.stderr) == (0, "")
    title, header, row = done.stdout.splitlines()
    assert title == "validation: best by accuracy (higher)"
    assert header.split() == ["step", "accuracy", "dataset", "checkpoint", "weights"]
    value = f"{info['value']:.6g}"
    assert row.split() == ["20", value, "validation", "ckpt-20", "best_ckpt/ckpt-20"]


def test_the_top_are_in_order_with_their_weights(capsys: Output, finished_run: Path) -> None:
    shown = _read_best(capsys, str(finished_run), "--top=3")

    first, second = shown["best"]
    assert (first["step"], first["weights"]) == (20, "best_ckpt/ckpt-20")
    assert (second["step"], second["weights"]) == (10, "ckpt-10")
    assert first["value"] == first["metrics"]["accuracy"] >= second["value"]


def test_a_sidecar_has_its_own_best(capsys: Output, finished_run: Path) -> None:
    shown = _read_best(capsys, str(finished_run), "--name=fast")
    assert shown["name"] == "fast"
    assert shown["best"][0]["weights"] == "evals/fast/best_ckpt/ckpt-20"


def test_another_metric_has_another_best(capsys: Output, finished_run: Path) -> None:
    shown = _read_best(capsys, str(finished_run), "--metric=validation_loss", "--comparison=higher")
    assert [row["step"] for row in shown["best"]] == [10]


def test_weights_that_are_gone_are_told(capsys: Output, finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished_run, folder)
    for path in [*folder.glob("ckpt-10.*"), *folder.glob("**/ckpt-20.*")]:
        path.unlink()

    assert main(["best", str(folder), "--top=2"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in rows] == ["gone", "gone"]


def test_a_ledger_without_a_finite_value_has_no_best(capsys: Output, tmp_path: Path) -> None:
    write_params(tmp_path, best_checkpoint_eval_metric="accuracy")
    write_ledger(tmp_path, evaluation(1, accuracy="nan"))

    assert main(["best", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("validation: no evaluation has a finite accuracy\n")
    assert _read_best(capsys, str(tmp_path))["best"] == []


def test_the_only_ledger_is_the_default_or_all_are_named(capsys: Output, tmp_path: Path) -> None:
    write_params(tmp_path, best_checkpoint_eval_metric="accuracy")
    write_ledger(tmp_path, evaluation(1, accuracy=0.5), name="slow")

    assert _read_best(capsys, str(tmp_path))["name"] == "slow"

    write_ledger(tmp_path, evaluation(1, accuracy=0.5), name="fast")
    assert main(["best", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("give one of: --name=fast, --name=slow\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top=0"], "error: --top: must be 1 or more, not 0"),
        (
            [],
            "error: --metric: is required, because the run keeps no best checkpoint; "
            "there are: accuracy, loss",
        ),
        (
            ["--metric=los", "--comparison=lower"],
            "error: --metric: no evaluation has 'los'; did you mean loss?",
        ),
        (["--comparison=lower"], "--comparison: needs --metric too"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(
    capsys: Output, tmp_path: Path, arguments: list[str], message: str
) -> None:
    write_ledger(write_params(tmp_path), evaluation(1, accuracy=0.5, loss=1.0))
    assert main(["best", str(tmp_path), *arguments]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_runs_own_metric_that_no_evaluation_has_is_told(capsys: Output, tmp_path: Path) -> None:
    two = {"two": {"metric": "loss", "metric_comp": "lower"}}
    write_params(tmp_path, best_checkpoint_eval_metric="accuracy", best_checkpoints=two)
    write_ledger(tmp_path, evaluation(1, acuracy=0.5))

    assert main(["best", str(tmp_path)]) == 2
    message = "no evaluation has 'accuracy'; did you mean acuracy?"
    assert f"error: trainer.best_checkpoint_eval_metric: {message}" in capsys.readouterr().err

    assert main(["best", str(tmp_path), "--best=two"]) == 2
    message = "error: trainer.best_checkpoints.two.metric: no evaluation has 'loss'"
    assert message in capsys.readouterr().err
