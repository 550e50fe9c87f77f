"""Fine-tunings of another run's checkpoints, on a tiny task with real files."""

from __future__ import annotations

import logging
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.builders import final_record, read_json
from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment
from tests.engine.telemetry.test_tensorboard import read_curves
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import (
    ConfigError,
    ModelDirInUseError,
    NothingToWaitForError,
    UsageError,
)
from trainer_kit.process.run_directory import count_starts
from trainer_kit.process.run_lock import RunLock
from trainer_kit.process.sidecar_lease import LeaseReader
from trainer_kit.run.launcher import launch
from trainer_kit.run.runner import run_experiment
from trainer_kit.testing import TinyConfig, compare_runs

MODE = "continuous_train_and_eval"
FOREIGN = "finetune-20/ckpt-10.index"
LATEST = {"policy": "latest"}
_models: list[Any] = []
# Which checkpoints are kept at each evaluation of the fine-tunings in `finished_run`.
_needed: list[set[int]] = []


@configclass
class _NotedConfig(LinearConfig):
    """The linear task with dropout."""

    dropout: float = 0.3


@register_task(_NotedConfig)
class _NotedTask(LinearTask):
    """Notes its models, and which of those before are still there when the next one is built."""

    def build_model(self) -> Any:
        _models.append(
            sum(model() is not None for model in _models if isinstance(model, weakref.ref))
        )
        model = super().build_model()
        _models.append(weakref.ref(model))
        return model


def _build_config(
    pretraining: Path, task: TinyConfig | None = None, **trainer: Any
) -> ExperimentConfig:
    steps = {
        "train_steps": 10,
        "checkpoint_interval": 5,
        "best_checkpoint_eval_metric": "accuracy",
        **trainer,
    }
    config = linear_experiment(**steps).replace(task=task or LinearConfig())
    return config.replace(task={"init_checkpoint": str(pretraining)})


def _launch(*arguments: Any, **options: Any) -> Any:
    """Launches a run that saves in the foreground, which takes less time in a short one."""
    return launch(*arguments, enable_async_checkpointing=False, **options)


@pytest.fixture(scope="module")
def pretrained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    config = linear_experiment(train_steps=30, max_to_keep=2).replace(task=_NotedConfig())
    _launch(config, "train", str(folder))
    assert list(complete_checkpoints(str(folder))) == [20, 30]

    return folder


def _select_protected_steps(pretraining: Path) -> set[int]:
    return LeaseReader(pretraining / "evals", 20).select_protected_steps([20, 30])


@pytest.fixture(scope="module")
def finished_run(pretrained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which both are fine-tuned, beside files of somebody else."""

    def look(logs: Any) -> None:
        _needed.append(_select_protected_steps(pretrained_run))

    folder = tmp_path_factory.mktemp("finetuned")
    for name in ("notes.txt", "model.index", "finetune-20/mine.txt", "finetune-20/ckpt-10.mine"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("kept")
    _models.clear()
    launch(_build_config(pretrained_run, _NotedConfig()), MODE, str(folder), eval_actions=[look])
    _needed.append(_select_protected_steps(pretrained_run))

    return folder


@pytest.fixture(scope="module")
def without_best(pretrained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the last checkpoint is fine-tuned, without a best, beside other files."""
    folder = tmp_path_factory.mktemp("remove_best_values")
    foreign = folder / FOREIGN
    foreign.parent.mkdir()
    for path in (foreign, folder / "metrics-20.json"):  # somebody has put metrics beside it
        path.write_text("{}")
    config = _build_config(pretrained_run, best_checkpoint_eval_metric="", continuous_eval=LATEST)
    _launch(config, MODE, str(folder))

    return folder


def _read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    records = [read_json(path) for path in folder.glob("metrics-*.json")]
    return {
        record["step"]: record for record in sorted(records, key=lambda record: int(record["step"]))
    }


def test_the_metrics_of_each_checkpoint_differ_and_name_it(
    finished_run: Path, pretrained_run: Path
) -> None:
    records = _read_metrics(finished_run)

    assert list(records) == [20, 30]
    assert [record["checkpoint"] for record in records.values()] == [
        f"{pretrained_run}/ckpt-{step}" for step in records
    ]
    assert len({record["metrics"]["validation_loss"] for record in records.values()}) == 2

    for step, record in records.items():
        final = final_record(finished_run / f"finetune-{step}")
        assert record["metrics"] == final["metrics"]
        assert record["finetune_steps"] == 10
        assert record["best"] == final["best"]
        assert (
            f"{pretrained_run}/ckpt-{step}"
            in (finished_run / f"finetune-{step}/params.yaml").read_text()
        )

    last = final_record(finished_run)

    assert last["step"] == 30
    assert last["mode"] == MODE
    assert last["metrics"] == records[30]["metrics"]


def test_the_curve_runs_over_the_steps_of_the_pretraining(finished_run: Path) -> None:
    accuracy = read_curves(finished_run / "validation")["."]["accuracy"]
    expected = [
        (step, pytest.approx(record["metrics"]["accuracy"]))
        for step, record in _read_metrics(finished_run).items()
    ]

    assert accuracy == expected


def test_only_the_best_checkpoint_and_foreign_files_stay(finished_run: Path) -> None:
    for name in ("notes.txt", "model.index", "finetune-20/mine.txt", "finetune-20/ckpt-10.mine"):
        assert (finished_run / name).read_text() == "kept"

    for step in (20, 30):
        assert complete_checkpoints(str(finished_run / f"finetune-{step}")) == {}
        assert not (finished_run / f"finetune-{step}/checkpoint").exists()
        assert list((finished_run / f"finetune-{step}/best_ckpt").glob("*.index"))


def test_a_model_is_freed_before_the_next_fine_tuning(finished_run: Path) -> None:
    assert [there for there in _models if isinstance(there, int)] == [0, 0]


def test_what_came_before_in_the_process_changes_no_bit(
    finished_run: Path, pretrained_run: Path, tmp_path: Path
) -> None:
    _launch(
        _build_config(pretrained_run, _NotedConfig(), continuous_eval=LATEST), MODE, str(tmp_path)
    )

    assert list(_read_metrics(tmp_path)) == [30]
    assert compare_runs(tmp_path / "finetune-30", finished_run / "finetune-30") == []


def test_a_restart_when_all_is_done_does_nothing_again(
    finished_run: Path, pretrained_run: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished_run.glob("*/*")}
    model, logs = _launch(_build_config(pretrained_run, _NotedConfig()), MODE, str(finished_run))

    assert model is None
    assert logs == _read_metrics(finished_run)[30]["metrics"]
    assert {path: path.stat().st_mtime_ns for path in finished_run.glob("*/*")} == before
    assert count_starts(finished_run) == 2


def test_an_ended_one_is_trained_further_with_more_train_steps(
    without_best: Path, pretrained_run: Path, tmp_path: Path
) -> None:
    run = Path(
        shutil.copytree(
            without_best, tmp_path / "run", ignore=shutil.ignore_patterns("*-20", "*-20.json")
        )
    )
    # As if it had been killed before; its last checkpoint is still there.
    (run / "metrics-30.json").unlink()
    config = _build_config(
        pretrained_run, best_checkpoint_eval_metric="", continuous_eval=LATEST, train_steps=15
    )

    _launch(config, MODE, str(run))

    assert _read_metrics(run)[30]["finetune_steps"] == 15


def test_a_lease_keeps_the_checkpoint_that_is_read(finished_run: Path) -> None:
    assert _needed == [{20, 30}, {30}, set()]


def test_without_a_best_checkpoint_the_last_one_stays(
    without_best: Path, pretrained_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(without_best, tmp_path / "run"))

    _launch(_build_config(pretrained_run, continuous_eval=LATEST), MODE, str(run))

    assert list(complete_checkpoints(str(run / "finetune-30"))) == [10]
    assert (run / FOREIGN).read_text() == "{}"


def test_what_never_comes_is_told_and_nothing_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _build_config(tmp_path / "nowhere", continuous_eval_timeout=0.3)

    with (
        caplog.at_level(logging.INFO),
        pytest.raises(NothingToWaitForError, match="nowhere: the folder does not"),
    ):
        _launch(config, MODE, str(tmp_path / "run"))

    assert (
        f"waiting for a checkpoint in {tmp_path}/nowhere: the folder does not exist" in caplog.text
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_fine_tunes_in_is_refused(
    finished_run: Path, pretrained_run: Path
) -> None:
    with RunLock(finished_run), pytest.raises(ModelDirInUseError, match="is in use"):
        _launch(_build_config(pretrained_run, _NotedConfig()), MODE, str(finished_run))


def test_a_config_that_changes_the_fine_tunings_is_refused(
    finished_run: Path, pretrained_run: Path
) -> None:
    with pytest.raises(ConfigError, match=r"task\.width: was 16 when this run began and is 5 now"):
        _launch(_build_config(pretrained_run, _NotedConfig(width=5)), MODE, str(finished_run))


def test_a_model_that_does_not_fit_is_refused_without_a_trace(
    pretrained_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="shape"):
        _launch(_build_config(pretrained_run, TinyConfig(width=5)), MODE, str(tmp_path / "run"))

    assert list(tmp_path.iterdir()) == []


def test_the_mode_belongs_to_launch(pretrained_run: Path, tmp_path: Path) -> None:
    config = _build_config(pretrained_run)

    with pytest.raises(UsageError, match=r"start it with trainer_kit\.launch"):
        run_experiment(None, LinearTask(LinearConfig()), MODE, config, str(tmp_path))

    assert list(tmp_path.iterdir()) == []
