"""`trainer-kit compare`, as a user runs it."""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.cli.written_runs import evaluation, write_ledger, write_process
from trainer_kit.cli.main import main
from trainer_kit.cli.runs.compare_runs import build_frame, group_by_seed
from trainer_kit.cli.runs.list_runs import read_runs
from trainer_kit.cli.view.recorded_evaluations import MetricChoice

ROOT = Path(__file__).parents[4]
Output = pytest.CaptureFixture[str]


def _write_run(
    folder: Path, rate: float, *accuracies: float, seed: int = 1, **optimizer: Any
) -> None:
    """Writes a finished run that was evaluated at steps 10, 20 and so on."""
    folder.mkdir(parents=True)
    trainer = {
        "train_steps": 60,
        "best_checkpoint_eval_metric": "accuracy",
        "optimizer_config": {"learning_rate": {"initial": rate}, "optimizer": optimizer},
    }
    config = {"trainer": trainer, "runtime": {"random_seed": seed}}
    (folder / "params.yaml").write_text(json.dumps(config))
    write_process(folder / "manifest.json", experiment="rings")
    write_process(folder / "final.json", step=60)
    records = [
        evaluation(10 * number, accuracy=accuracy, loss=1 - accuracy)
        for number, accuracy in enumerate(accuracies, 1)
    ]
    write_ledger(folder, *records)
    report = {
        "kind": "train",
        "step": 60,
        "steps_per_second": 2.5,
        "metrics": {"training_loss": 0.25, "accuracy": 0.5},
    }
    (folder / "metrics.jsonl").write_text(json.dumps(report) + "\n")


def test_the_best_run_is_first_with_what_was_changed(capsys: Output, tmp_path: Path) -> None:
    _write_run(tmp_path / "slow", 0.001, 0.25, 0.5)
    _write_run(tmp_path / "good", 0.01, 0.75, 0.625)
    _write_run(tmp_path / "none", 0.1)

    assert main(["compare", str(tmp_path)]) == 0

    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "runs by accuracy, best first"
    columns = "run initial best best_step last steps_per_second state"
    assert header.split() == columns.split()
    assert [row.split() for row in rows] == [
        ["good", "0.01", "0.75", "10", "0.625", "2.5", "finished"],
        ["slow", "0.001", "0.5", "20", "0.5", "2.5", "finished"],
        ["none", "0.1", "-", "-", "-", "2.5", "finished"],
    ]


def test_runs_that_differ_in_their_seeds_are_one_row(capsys: Output, tmp_path: Path) -> None:
    bests = [0.5, 0.75, 0.875]
    for seed, best in enumerate(bests):
        _write_run(tmp_path / f"low_{seed}", 0.001, best, 0.25, seed=seed)
    _write_run(tmp_path / "high", 0.01, 0.125)
    _write_run(tmp_path / "nan", 0.01, math.nan, seed=2)
    _write_run(tmp_path / "alive", 0.01, 0.0625)
    (tmp_path / "alive" / "final.json").unlink()
    (tmp_path / "empty").mkdir()

    assert main(["compare", str(tmp_path)]) == 0

    mean = statistics.fmean(bests)
    deviation = statistics.stdev(bests)
    _, seeds = capsys.readouterr().out.split("\n\n")
    title, header, *rows = [line.split() for line in seeds.splitlines()]
    assert "only in seeds" in " ".join(title)
    columns = "ended initial runs finite mean best std best mean last std last"
    assert header == columns.split()
    assert rows == [
        ["yes", "0.001", "3", "3", f"{mean:.6g}", f"{deviation:.6g}", "0.25", "0"],
        ["yes", "0.01", "2", "1", "0.125", "-", "0.125", "-"],
        ["no", "0.01", "1", "1", "0.0625", "-", "0.0625", "-"],
    ]


def test_runs_that_have_not_ended_are_compared(capsys: Output, tmp_path: Path) -> None:
    for seed in (1, 2):
        _write_run(tmp_path / f"run_{seed}", 0.1, seed / 4, seed=seed)
        (tmp_path / f"run_{seed}" / "final.json").unlink()

    assert main(["compare", str(tmp_path)]) == 0

    runs, seeds = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in runs.splitlines()[2:]] == ["run_2", "run_1"]
    assert seeds.splitlines()[-1].split()[:4] == ["no", "2", "2", "0.375"]


def test_another_metric_sorts_by_its_own_direction(capsys: Output, tmp_path: Path) -> None:
    _write_run(tmp_path / "a", 0.001, 0.25)
    _write_run(tmp_path / "b", 0.01, 0.75)

    for metric, first in (("loss", "b"), ("training_loss", "a")):
        assert main(["compare", str(tmp_path), f"--metric={metric}"]) == 0
        assert capsys.readouterr().out.splitlines()[2].split()[0] == first

    assert main(["compare", str(tmp_path), "--metric=los"]) == 2
    assert "--metric: no evaluation has 'los'; did you mean loss?" in capsys.readouterr().err


def test_folders_without_a_run_do_not_choose_the_metric(capsys: Output, tmp_path: Path) -> None:
    for name in ("empty", "foreign"):
        (tmp_path / name).mkdir()
    assert main(["compare", str(tmp_path)]) == 0
    assert "runs by training_loss" in capsys.readouterr().out

    _write_run(tmp_path / "run", 0.1, 0.25)
    assert main(["compare", str(tmp_path)]) == 0
    assert "runs by accuracy" in capsys.readouterr().out


def test_branches_of_other_runs_are_not_changes(tmp_path: Path) -> None:
    _write_run(tmp_path / "a", 0.1, 0.25, type="adam", adam={"beta_1": 0.9, "beta_2": 0.99})
    _write_run(tmp_path / "b", 0.1, 0.25, type="adam", adam={"beta_1": 0.8, "beta_2": 0.99})
    _write_run(tmp_path / "c", 0.1, 0.25, type="sgd", sgd={"momentum": 0.5})

    frame = build_frame(read_runs([str(tmp_path)]), MetricChoice("accuracy", "higher"))

    prefix = "config.trainer.optimizer_config.optimizer"
    changed = [column for column in frame if column.startswith("config.")]
    assert changed == [f"{prefix}.type", f"{prefix}.adam.beta_1"]
    groups = group_by_seed(frame, MetricChoice("accuracy", "higher"), changed)
    assert list(groups["runs"]) == [1, 1, 1]


def _read_sections(capsys: Output, folder: Path) -> list[str]:
    """Returns the tables that `compare` prints for `folder`."""
    assert main(["compare", str(folder)]) == 0
    return capsys.readouterr().out.split("\n\n")


def test_runs_with_another_branch_are_no_group(capsys: Output, tmp_path: Path) -> None:
    for seed in (1, 2):
        _write_run(tmp_path / f"sgd_{seed}", 0.1, seed / 4, seed=seed, sgd={"momentum": 0.5})
    _write_run(tmp_path / "both", 0.1, 0.75, seed=3, sgd={"momentum": 0.5}, adam={"beta": 0.9})

    _, seeds = _read_sections(capsys, tmp_path)

    assert [line.split()[:4] for line in seeds.splitlines()[2:]] == [
        ["yes", "1", "1", "0.75"],
        ["yes", "2", "2", "0.375"],
    ]


def test_a_text_and_a_number_are_no_group(capsys: Output, tmp_path: Path) -> None:
    _write_run(tmp_path / "text", 0.1, 0.25, power="1")
    _write_run(tmp_path / "number", 0.1, 0.75, power=1)

    (runs,) = _read_sections(capsys, tmp_path)

    assert "power" in runs.splitlines()[1]


@pytest.mark.parametrize("name", ["manifest.json", "params.yaml"])
def test_without_experiment_or_config_runs_are_no_group(
    name: str, capsys: Output, tmp_path: Path
) -> None:
    for seed in (1, 2):
        _write_run(tmp_path / f"fit_{seed}", 0.1, seed / 4, seed=seed)
        (tmp_path / f"fit_{seed}" / name).unlink()

    assert len(_read_sections(capsys, tmp_path)) == 1


def test_a_link_is_not_a_second_run(capsys: Output, tmp_path: Path) -> None:
    _write_run(tmp_path / "runs" / "run", 0.1, 0.25)
    (tmp_path / "runs" / "latest").symlink_to("run")
    folders = [str(tmp_path / "runs"), str(tmp_path / "runs" / "latest")]

    (runs,) = _read_sections(capsys, tmp_path / "runs")
    assert [line.split()[0] for line in runs.splitlines()[2:]] == ["run"]

    assert main(["compare", *folders]) == 0
    assert capsys.readouterr().out.count("finished") == 1


def test_texts_are_shown_with_their_own_quotes(tmp_path: Path) -> None:
    texts = ['say "hi"', 'say "hi', '"quoted"', "quoted"]
    for number, text in enumerate(texts):
        _write_run(tmp_path / f"run_{number}", 0.1, 0.25, text=text)

    frame = build_frame(read_runs([str(tmp_path)]), MetricChoice("accuracy", "higher"))

    assert list(frame["config.trainer.optimizer_config.optimizer.text"]) == texts


def test_the_columns_of_all_tables_keep_their_names(capsys: Output, tmp_path: Path) -> None:
    for number in range(4):
        value = number // 2
        changed = {"state": value, "best": value, "run": value, "runs": value, "momentum": value}
        _write_run(tmp_path / f"run_{number}", 0.1, number / 4, seed=number, **changed)

    for table in _read_sections(capsys, tmp_path):
        header = table.splitlines()[1].split()
        prefix = "config.trainer.optimizer_config.optimizer"
        paths = [f"{prefix}.{name}" for name in ("state", "best", "run", "runs")]
        assert [name for name in header if name.startswith("config.")] == paths
        assert "momentum" in header


def test_an_odd_config_hides_no_other_run(capsys: Output, tmp_path: Path) -> None:
    params = {
        "metric": "trainer: {best_checkpoint_eval_metric: [accuracy]}",
        "number": "trainer: {best_checkpoint_eval_metric: 5}",
        "order": "trainer: {best_checkpoint_eval_metric: a, best_checkpoint_metric_comp: [b]}",
        "binary": "task: {image: !!binary aGk=, images: [!!binary aGk=: 1]}",
    }
    for name, text in params.items():
        _write_run(tmp_path / name, 0.1, 0.25)
        (tmp_path / name / "params.yaml").write_text(text)

    for command in ("runs", "compare"):
        assert main([command, str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("finished") == 4


def test_the_name_of_a_folder_may_not_be_utf_8(capsys: Output, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = os.fsdecode(b"caf\xe9")
    _write_run(tmp_path / "runs" / name, 0.1, 0.25)
    _write_run(tmp_path / "runs" / "other", 0.1, 0.5)
    path = tmp_path / "runs.csv"
    arguments = [f"--csv={path}", f"--plot={tmp_path}/curves.png"]

    assert main(["compare", str(tmp_path / "runs"), *arguments]) == 0

    assert "\ncaf\\xe9 " in capsys.readouterr().out
    assert "\ncaf\\xe9," in path.read_text()


def test_the_csv_file_has_all_digits_and_metrics(capsys: Output, tmp_path: Path) -> None:
    third = 1 / 3
    _write_run(tmp_path / "runs" / "a", 0.001, third, 0.125)
    _write_run(tmp_path / "runs" / "b", 0.01, 0.25)
    (tmp_path / "runs" / "empty").mkdir()
    path = tmp_path / "runs.csv"

    assert main(["compare", str(tmp_path / "runs"), f"--csv={path}"]) == 0

    assert capsys.readouterr().out.endswith(f"the table is in {path}\n")
    first, second, empty = csv.DictReader(path.read_text().splitlines())
    assert (first["run"], first["best_step"], float(first["best"])) == ("a", "10", third)
    assert (first["last.accuracy"], first["last.loss"]) == ("0.125", "0.875")
    assert first["train.training_loss"] == "0.25"
    assert not any("seedless" in name for name in first)
    column = "config.trainer.optimizer_config.learning_rate.initial"
    assert (first[column], second[column], empty[column]) == ("0.001", "0.01", "")
    assert empty["state"] == "empty"


def test_the_picture_has_the_curves_of_the_best_runs(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    for number in range(12):
        _write_run(tmp_path / "runs" / f"run_{number:02}", 0.1, number / 12)
    figures = []
    save = figure.Figure.savefig

    def save_and_keep(self: Any, path: str) -> None:
        figures.append(self)
        save(self, path)

    monkeypatch.setattr(figure.Figure, "savefig", save_and_keep)
    path = tmp_path / "curves.png"

    assert main(["compare", str(tmp_path / "runs"), f"--plot={path}", "--metric=loss"]) == 0

    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"the picture is in {path}\n")
    (axes,) = figures[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == [f"run_{number:02}" for number in range(11, 1, -1)]
    assert axes.lines[0].get_xydata().tolist() == [[10, 1 - 11 / 12]]


def test_mistakes_are_one_message(capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(tmp_path / "empty")]) == 2
    assert f"{tmp_path}/empty contains no run; give a folder" in capsys.readouterr().err

    write_ledger(tmp_path / "run", evaluation(10, perplexity=2.0))
    assert main(["compare", str(tmp_path), "--metric=perplexity"]) == 2
    assert "Give --comparison=higher or lower too" in capsys.readouterr().err

    assert main(["compare", str(tmp_path), "--plot=a.jpgg"]) == 2
    assert "--plot=a.jpgg: the picture cannot be saved: Format 'jpgg' is" in capsys.readouterr().err


def test_a_hundred_runs_need_no_tensorflow(tmp_path: Path) -> None:
    for number in range(100):
        _write_run(tmp_path / f"run_{number}", number / 1000, 0.5, 0.25)
    program = (
        "import sys, time; start = time.process_time();"
        "from trainer_kit.cli.main import main; code = main(sys.argv[1:]);"
        "seconds = time.process_time() - start;"
        "heavy = {'tensorflow', 'keras', 'matplotlib'} & set(sys.modules);"
        "sys.exit(code or heavy or seconds > 6)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", str(tmp_path)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("finished") == 100
