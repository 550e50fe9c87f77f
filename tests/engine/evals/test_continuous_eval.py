"""Evaluations beside a run, through the Python interface, on a tiny task with real files."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.builders import json_lines, read_json
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from tests.engine.telemetry.test_tensorboard import read_curves
from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.errors import NothingToWaitForError, UsageError
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.run_lock import RunLock
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.run.launcher import launch

_CONFIG = linear_experiment(train_steps=40, best_checkpoint_eval_metric="accuracy")


def _run(
    folder: Path, mode: str = "train", config: ExperimentConfig | None = None, **arguments: Any
) -> Any:
    return launch(config or linear_experiment(), mode, str(folder), **arguments)


@pytest.fixture(scope="module")
def ready() -> ReadyTrainer:
    """The trainer of the runs that are evaluated, and of sidecars that keep no best checkpoint."""
    return ReadyTrainer(_CONFIG, LinearTask)


@pytest.fixture(scope="module")
def once_trained(tmp_path_factory: pytest.TempPathFactory, ready: ReadyTrainer) -> Path:
    """A run of 40 steps, saved at each tenth and not evaluated; all checkpoints are there."""
    folder = tmp_path_factory.mktemp("sidecar") / "run"
    _run(folder, config=_CONFIG, trainer=ready.again())
    return folder


@pytest.fixture
def run(once_trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(once_trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def once_evaluated(
    once_trained: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A copy that a sidecar has evaluated all of, and the logs that the sidecar has returned."""
    folder = Path(shutil.copytree(once_trained, tmp_path_factory.mktemp("evaluated") / "run"))
    return folder, _run(folder, "continuous_eval", _CONFIG)[1]


@pytest.fixture
def evaluated_run(once_evaluated: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of that folder, to go on with."""
    return Path(shutil.copytree(once_evaluated[0], tmp_path / "evaluated"))


def _read_ledger(folder: Path) -> list[tuple[int, str | None]]:
    records = json_lines(folder / "evals/continuous_eval.jsonl")
    return [(record["step"], record.get("checkpoint")) for record in records]


def test_continuous_eval_scores_all_and_ends_with_the_run(
    once_evaluated: tuple[Path, dict[str, Any]],
) -> None:
    folder, logs = once_evaluated
    ledger = json_lines(folder / "evals/continuous_eval.jsonl")

    assert [record["step"] for record in ledger] == [10, 20, 30, 40]
    assert logs["validation_loss"] == pytest.approx(ledger[-1]["metrics"]["validation_loss"])
    assert (folder / "evals" / "continuous_eval" / "best_ckpt" / "info.json").exists()
    assert not (folder / "best_ckpt").exists()


def test_a_sidecar_goes_by_the_steps_of_the_run_not_by_its_own(
    ready: ReadyTrainer, run: Path
) -> None:
    """And while it reads a checkpoint, the run rotates none away that it has not read yet."""

    def train_on(logs: Any) -> None:
        if not (run / "ckpt-60.index").exists():
            config = _CONFIG.replace(trainer={"train_steps": 60, "max_to_keep": 1})
            _run(run, config=config, trainer=ready.again())

    (run / "final.json").unlink()
    params = (run / "params.yaml").read_text()
    (run / "params.yaml").write_text(params.replace("train_steps: 40", "train_steps: 60"))

    _run(run, "continuous_eval", _CONFIG, eval_actions=[train_on])

    assert list(complete_checkpoints(str(run))) == [10, 20, 30, 40, 50, 60]
    assert _read_ledger(run) == [(step, f"ckpt-{step}") for step in (10, 20, 30, 40, 50, 60)]


def test_continuous_eval_does_not_wait_for_ever(tmp_path: Path) -> None:
    config = linear_experiment(continuous_eval_timeout=0.2)

    with pytest.raises(
        NothingToWaitForError, match=r"no new checkpoint .*/empty: the folder is empty; no run"
    ):
        _run(tmp_path / "empty", "continuous_eval", config)


def test_a_sidecar_that_is_started_again_evaluates_nothing_twice(
    once_evaluated: tuple[Path, dict[str, Any]], evaluated_run: Path
) -> None:
    info = (evaluated_run / "evals/continuous_eval/best_ckpt/info.json").read_text()
    _, again = _run(evaluated_run, "continuous_eval", _CONFIG)

    assert _read_ledger(evaluated_run) == [(step, f"ckpt-{step}") for step in (10, 20, 30, 40)]
    assert again == pytest.approx(
        {name: value for name, value in once_evaluated[1].items() if name in again}
    )
    assert (evaluated_run / "evals/continuous_eval/best_ckpt/info.json").read_text() == info

    curves = read_curves(evaluated_run / "evals/continuous_eval")
    assert [step for step, _ in curves["."]["accuracy"]] == [10, 20, 30, 40]


def test_a_sidecar_with_other_data_evaluates_all_again(evaluated_run: Path) -> None:
    _run(evaluated_run, "continuous_eval", _CONFIG.replace(task={"examples": 50}))
    assert [step for step, _ in _read_ledger(evaluated_run)] == [10, 20, 30, 40] * 2


def test_the_newest_only_is_evaluated_when_the_config_says_so(
    ready: ReadyTrainer, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _CONFIG.replace(trainer={"continuous_eval": {"policy": "latest"}})

    with caplog.at_level(logging.INFO):
        _run(run, "continuous_eval", config, trainer=ready.again())

    assert _read_ledger(run) == [(40, "ckpt-40")]
    assert "skipped: ckpt-10, ckpt-20, ckpt-30" in caplog.text


def test_a_rewound_run_is_followed_and_evaluated_again(evaluated_run: Path) -> None:
    rate = {"optimizer_config": {"learning_rate": {"constant": {"learning_rate": 0.1}}}}
    other = _CONFIG.replace(trainer={"train_steps": 30, **rate})
    _run(evaluated_run, config=other, from_step=10)
    _, logs = _run(evaluated_run, "continuous_eval", other)

    lines = json_lines(evaluated_run / "evals/continuous_eval.jsonl")

    assert [(line["lineage"], line["step"], line.get("kind")) for line in lines] == [
        (0, 10, None),
        (0, 20, None),
        (0, 30, None),
        (0, 40, None),
        (1, 10, "rewind"),
        (1, 20, None),
        (1, 30, None),
    ]
    assert lines[-1]["metrics"]["validation_loss"] != lines[2]["metrics"]["validation_loss"]
    assert logs["validation_loss"] == pytest.approx(lines[-1]["metrics"]["validation_loss"])

    active = [
        line for line in lines if "metrics" in line and (line["lineage"] or line["step"] == 10)
    ]
    best = max(active, key=lambda line: float(line["metrics"]["accuracy"]))

    assert logs["best_accuracy"] == pytest.approx(best["metrics"]["accuracy"])

    curves = read_curves(evaluated_run / "evals/continuous_eval")
    assert [step for step, _ in curves["."]["accuracy"]] == [10, 20, 30]


def test_one_that_cannot_begin_leaves_the_folder_as_it_was(run: Path) -> None:
    before = sorted(os.listdir(run))

    with pytest.raises(UsageError, match="not a validation metric"):
        _run(
            run,
            "continuous_eval",
            _CONFIG.replace(trainer={"best_checkpoint_eval_metric": "acuracy"}),
        )

    assert sorted(os.listdir(run)) == before


def _create_sidecar(
    folder: Path, train_steps: int = 20, best: BestWeightsExporter | None = None, step: int = 0
) -> Sidecar:
    directory = RunDirectory(str(folder), TrainerConfig(), "side")
    ledger = Ledger(directory.ledger_path, dataset="eval", config_hash="a")
    lease = Lease(directory.evals_dir, "side", lambda: ("wait", 0))
    return Sidecar(directory, ledger, best, None, lease, train_steps, tf.Variable(step))


@pytest.mark.parametrize("point", ["ledger.append", "best.info.open", "best.info.rename"])
def test_a_sidecar_killed_in_a_rewind_keeps_no_later_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def start() -> BestWeightsExporter:
        return BestWeightsExporter(str(tmp_path / "best"), "accuracy", keep=2)

    def die(reached: str, path: str) -> None:
        if reached == point:
            raise KeyboardInterrupt

    best = start()
    weights = tf.train.Checkpoint(w=tf.Variable(1.0))
    ledger = Ledger(tmp_path / "evals/side.jsonl", dataset="eval", config_hash="a")
    for step, accuracy in ((10, 0.5), (20, 0.9)):
        best.maybe_export_checkpoint(weights, {"accuracy": accuracy}, step)
        ledger.append(step, {"accuracy": accuracy}, 0.1, f"ckpt-{step}")

    Ledger(tmp_path / "evals/validation.jsonl", dataset="validation", config_hash="").rewind(10)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "on_write_point", die)
        _create_sidecar(tmp_path, best=best).begin()

    best = start()
    _create_sidecar(tmp_path, best=best).begin()

    assert best.best == ("accuracy", 0.5, 10)
    assert read_json(tmp_path / "best/info.json")["step"] == 10
    assert list(complete_checkpoints(str(tmp_path / "best"))) == [10]


def test_a_trainer_is_alive_while_its_heart_beats(tmp_path: Path) -> None:
    sidecar = _create_sidecar(tmp_path)

    assert not sidecar.is_alive()
    assert "no run has begun there" in sidecar.describe_trainer()

    with RunLock(tmp_path, lambda: ("evaluate", 40)):
        assert sidecar.is_alive()
        assert sidecar.describe_trainer().endswith(
            f"pid {os.getpid()}) is alive; its last heartbeat was at step 40 (evaluate)"
        )

    assert not sidecar.is_alive()
    assert sidecar.describe_trainer().endswith(" ended at step 40: done")


def test_a_silent_heartbeat_on_another_host_means_a_dead_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = _create_sidecar(tmp_path)
    with RunLock(tmp_path, lambda: ("train", 40), host="elsewhere"):
        text = (tmp_path / "heartbeat.json").read_text()
        assert sidecar.is_alive()

    (tmp_path / "heartbeat.json").write_text(text)
    monkeypatch.setattr("trainer_kit.evals.continuous_eval._SILENT_SECONDS", 0.0)

    assert not sidecar.is_alive()
    assert "elsewhere" in sidecar.describe_trainer()
    assert "is gone; its last" in sidecar.describe_trainer()


def test_a_run_is_not_finished_while_its_trainer_is_alive(tmp_path: Path) -> None:
    (tmp_path / "final.json").write_text('{"step": 40, "mode": "train", "metrics": {}}')

    with RunLock(tmp_path, lambda: ("start", 0)):
        assert not _create_sidecar(tmp_path, train_steps=40).is_finished()

    assert _create_sidecar(tmp_path, train_steps=40).is_finished()


def test_a_step_whose_checkpoint_is_gone_is_no_end_of_a_run(tmp_path: Path) -> None:
    sidecar = _create_sidecar(tmp_path, train_steps=30, step=40)

    (tmp_path / "ckpt-10.index").touch()

    assert not sidecar.is_finished()

    (tmp_path / "ckpt-30.index").touch()

    assert sidecar.is_finished()


def test_a_run_is_finished_when_final_json_has_enough_steps(tmp_path: Path) -> None:
    final = '{"step": 40, "mode": "train", "metrics": {}}'
    (tmp_path / "final.json").write_text(final)

    assert not _create_sidecar(tmp_path, train_steps=100).is_finished()  # it may be about to go on
    assert _create_sidecar(tmp_path, train_steps=40).is_finished()

    (tmp_path / "final.json").write_text(final.replace("{}}", '{}, "stopped": "enough"}'))

    assert _create_sidecar(tmp_path, train_steps=100).is_finished()
