"""`trainer-kit best --recompute`, and what a run keeps under names, as a user sees them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.linear_task import linear_experiment
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import problem, read_record
from trainer_kit.cli.main import main
from trainer_kit.process.run_lock import RunLock
from trainer_kit.run.launcher import launch

ROOT = Path(__file__).parents[3]
Output = pytest.CaptureFixture[str]

_EXPERIMENT = """
import trainer_kit
from tests.engine.linear_task import linear_experiment

trainer_kit.register_experiment("recomputed")(linear_experiment)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps that keeps the two evaluations with the lowest loss, and a sidecar that does."""
    folder = tmp_path_factory.mktemp("recompute") / "run"
    two = {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}
    config = linear_experiment(train_steps=30, best_checkpoint_eval_metric="accuracy", best_checkpoints={"two": two})
    (folder.parent / "recomputed.py").write_text(_EXPERIMENT)
    launch(config, "train_and_eval", str(folder), experiment="recomputed")
    launch(config, "continuous_eval", str(folder), eval_name="beside")
    return folder


@pytest.fixture(scope="module")
def of_sets(finished: Path) -> Path:
    """A run of 20 steps with two validation sets, that keeps the evaluations of one with the lowest loss; a sidecar."""
    config = linear_experiment(best_checkpoints={"two": {"metric": "hard|validation_loss", "metric_comp": "lower"}})
    data = config.task.validation_data  # type: ignore[attr-defined]
    config = config.replace(task={"validation_data": {"dev": data, "hard": data}})
    launch(config, "train_and_eval", str(finished.parent / "of_sets"), experiment="recomputed")
    launch(config, "continuous_eval", str(finished.parent / "of_sets"), eval_name="beside")
    return finished.parent / "of_sets"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _without_tensorflow(*commands: list[str]) -> str:
    """What `trainer-kit best` writes with each list of arguments, in one process that imports no TensorFlow."""
    code = (
        f"import sys; from trainer_kit.cli.main import main; print({{main(['best', *one]) for one in {[*commands]}}}, "
        "'tensorflow' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    *lines, last = done.stdout.splitlines()
    assert last == "{0} False", done.stderr
    return "\n".join(lines)


def test_a_run_that_is_right_has_nothing_to_do(capsys: Output, run: Path) -> None:
    before = {name: _files(run / name) for name in ("best_ckpt", "best_checkpoints/two", ".")}
    assert main(["best", str(run), "--recompute"]) == 0
    lines = capsys.readouterr().out.splitlines()
    done = "nothing to do; best is step"
    assert [line[: line.index(" step ") + 5] for line in lines] == [
        f"best_ckpt: {done}",
        f"best_checkpoints/two: {done}",
    ]
    assert {name: _files(run / name) for name in before} == before  # the heartbeat too


def test_what_the_weights_tell_is_made_again_without_tensorflow(run: Path) -> None:
    folders = {"validation": run / "best_checkpoints" / "two", "beside": run / "evals/beside/best_checkpoints/two"}
    before = {name: _files(folder) for name, folder in folders.items()}
    for folder in folders.values():
        (folder / "info.json").write_text("{")
    told = _without_tensorflow(*([str(run), "--recompute", f"--name={name}"] for name in folders))
    for folder in folders.values():
        assert f"{os.path.relpath(folder, run)}: info.json was rebuilt; best is step " in told
    assert {name: _files(folder) for name, folder in folders.items()} == before


@pytest.mark.parametrize("name", ["validation", "beside"])
def test_weights_that_are_lost_are_exported_from_the_checkpoints(
    capsys: Output, finished: Path, run: Path, name: str
) -> None:
    folder = (run if name == "validation" else run / "evals" / name) / "best_checkpoints" / "two"
    steps, info = list(complete_checkpoints(str(folder))), (folder / "info.json").read_bytes()
    shutil.rmtree(folder)
    module = f"--import_module={finished.parent / 'recomputed.py'}"
    assert main(["best", str(run), "--recompute", f"--name={name}", module]) == 0
    listed = ", ".join(f"ckpt-{step}" for step in steps)
    assert f"two: info.json was rebuilt; exported: {listed}; best is" in capsys.readouterr().out
    prefixes = complete_checkpoints(str(folder))
    assert list(prefixes) == steps and (folder / "info.json").read_bytes() == info
    assert all(problem(prefix) == "" and read_record(prefix) for prefix in prefixes.values())


@pytest.mark.parametrize("name", ["validation", "beside"])
def test_what_is_kept_of_several_validation_sets_is_made_again(of_sets: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(of_sets, tmp_path / "run"))
    folder = (run if name == "validation" else run / "evals" / name) / "best_checkpoints" / "two"
    before, info = sorted(_files(folder)), json.loads((folder / "info.json").read_text())
    assert {"dev|accuracy", "hard|accuracy"} <= info["metrics"].keys()
    shutil.rmtree(folder)
    module = f"--import_module={of_sets.parent / 'recomputed.py'}"
    assert main(["best", str(run), "--recompute", f"--name={name}", module]) == 0
    assert sorted(_files(folder)) == before and json.loads((folder / "info.json").read_text()) == info


def test_what_is_gone_with_its_checkpoint_is_told(capsys: Output, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = run / "best_checkpoints/two"
    lost, left = list(complete_checkpoints(str(folder)))
    for path in [*run.glob("ckpt-*.index"), folder / f"ckpt-{lost}.index"]:
        path.unlink()
    assert main(["best", str(run), "--recompute"]) == 0
    assert f"the weights of step {lost} should be kept (validation_loss " in caplog.text
    assert f"weights: ckpt-{left}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "validation",
            "run the training command again, with a larger trainer.train_steps if the run is finished",
        ),
        ("beside", "run the command of the sidecar again"),
    ],
)
def test_without_an_experiment_one_line_says_how_to_export(capsys: Output, run: Path, name: str, advice: str) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "experiment": ""}))
    shutil.rmtree((run if name == "validation" else run / "evals" / name) / "best_checkpoints/two")
    assert main(["best", str(run), "--recompute", f"--name={name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --recompute: ckpt-") and line.endswith(advice)


def test_it_is_refused_while_the_trainer_is_alive(capsys: Output, run: Path) -> None:
    with RunLock(run):
        assert main(["best", str(run), "--recompute"]) == 4
        assert "is in use" in capsys.readouterr().err
        assert main(["best", str(run), "--recompute", "--name=beside"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recompute", "--metric=accuracy"], "leave out --metric"),
        (["--recompute", "--top=2"], "leave out --top"),
        (["--best=too"], "--best: the run keeps no best checkpoint 'too'; did you mean two?"),
        (["--best=two", "--metric=accuracy"], "leave out --metric"),
    ],
)
def test_mistakes_are_told(capsys: Output, finished: Path, arguments: list[str], message: str) -> None:
    assert main(["best", str(finished), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_keeps_no_best_has_nothing_to_recompute(capsys: Output, tmp_path: Path, run: Path) -> None:
    (run / "params.yaml").write_text("trainer: {}\n")
    assert main(["best", str(run), "--recompute"]) == 2
    assert "keeps no best checkpoint for the evaluations of evals/validation.jsonl" in capsys.readouterr().err


def test_what_is_kept_under_a_name_is_shown_with_its_weights(capsys: Output, finished: Path) -> None:
    assert main(["best", str(finished), "--best=two", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    steps = sorted(one["step"] for one in shown["best"])
    assert steps == list(complete_checkpoints(str(finished / "best_checkpoints/two")))
    assert [one["weights"] for one in shown["best"]] == [
        f"best_checkpoints/two/ckpt-{one['step']}" for one in shown["best"]
    ]
    assert shown["best"][0]["value"] <= shown["best"][1]["value"]
    assert shown["info"]["agrees"] is True
