"""Every mode through the Python interface, on a tiny task with real files."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close, final_record, json_lines, read_json
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from tests.engine.traces import times_traced
from trainer_kit import files
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.trackers import TrackedRun, Tracker
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import (
    ConfigError,
    DataError,
    PreemptedError,
    StorageError,
    UsageError,
)
from trainer_kit.process.run_lock import EndState
from trainer_kit.run.controller import Controller
from trainer_kit.run.launcher import launch
from trainer_kit.run.runner import run_experiment
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.metrics_jsonl import read_active_history
from trainer_kit.testing import compare_runs, tiny_arrays
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import create_trainer

_BEST = {"best_checkpoint_eval_metric": "accuracy"}
# Ends within a loop, and off every interval; with dropout, it depends on random numbers too.
_TRAINED = linear_experiment(train_steps=17).replace(task={"dropout": 0.3})
# Half of the evaluations are at steps without a checkpoint.
_EVALUATED = linear_experiment(train_steps=60, checkpoint_interval=20, **_BEST)


def _run(
    folder: Path, mode: str = "train", config: ExperimentConfig | None = None, **arguments: Any
) -> Any:
    """Launches a run. It saves in the foreground, which takes less time, unless a test asks."""
    arguments = {"enable_async_checkpointing": False, **arguments}
    return launch(config or linear_experiment(), mode, str(folder), **arguments)


def _list_steps(folder: Path, kind: str) -> list[int]:
    return [
        record["step"]
        for record in read_active_history(str(folder / "metrics.jsonl"))
        if record["kind"] == kind
    ]


def _read_weights(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


@pytest.fixture(scope="module")
def linear() -> ReadyTrainer:
    """The trainer of runs of which only what the run does counts."""
    return ReadyTrainer(linear_experiment(), LinearTask)


@pytest.fixture(scope="module")
def of_trained() -> ReadyTrainer:
    return ReadyTrainer(_TRAINED, LinearTask)


@pytest.fixture(scope="module")
def once_trained(tmp_path_factory: pytest.TempPathFactory, of_trained: ReadyTrainer) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    launch(_TRAINED, "train", str(folder), trainer=of_trained.again())
    return folder


@pytest.fixture
def trained_run(once_trained: Path, tmp_path: Path) -> Path:
    """A copy of its folder."""
    return Path(shutil.copytree(once_trained, tmp_path / "trained"))


@pytest.fixture(scope="module")
def of_evaluated() -> ReadyTrainer:
    return ReadyTrainer(_EVALUATED, LinearTask)


@pytest.fixture(scope="module")
def once_evaluated(tmp_path_factory: pytest.TempPathFactory, of_evaluated: ReadyTrainer) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    launch(_EVALUATED, "train_and_eval", str(folder), trainer=of_evaluated.again(folder))
    return folder


@pytest.fixture
def evaluated_run(once_evaluated: Path, tmp_path: Path) -> Path:
    """A copy of its folder."""
    return Path(shutil.copytree(once_evaluated, tmp_path / "evaluated"))


@pytest.fixture(scope="module")
def evaluator() -> Trainer:
    """Evaluates any checkpoint of _EVALUATED in mode eval. It is traced once."""
    return create_trainer(_EVALUATED, LinearTask(_EVALUATED.task), train=False)


def _read_tags(folder: Path) -> dict[str, list[int]]:
    tags: dict[str, list[int]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                tags.setdefault(value.tag, []).append(event.step)

    return tags


def test_train_saves_records_and_reports_its_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="trainer_kit")
    model, logs = launch(linear_experiment(train_steps=13), "train", str(tmp_path))

    assert logs == {}
    # At the interval, and at the end off the interval.
    assert list(complete_checkpoints(str(tmp_path))) == [10, 13]
    assert _list_steps(tmp_path, "train") == [5, 10, 13]

    final = final_record(tmp_path)
    spent = final["time"]

    assert final["step"] == 13
    assert spent["steps"] == 13
    # Milliseconds.
    assert all(spent[name] > 0 for name in ("start", "step", "save"))
    assert spent["input"] >= 0
    assert caplog.messages[-2].startswith("time of this process: ")
    assert caplog.messages[-1] == spent["verdict"]
    assert read_json(tmp_path / "manifest.json")["packages"]["tensorflow"] == tf.__version__
    assert "train_steps: 13" in (tmp_path / "params.yaml").read_text()
    assert {"loss", "accuracy", "learning_rate", "steps_per_second"} <= _read_tags(
        tmp_path / "train"
    ).keys()
    assert model.count_params() == 27


def test_train_and_eval_evaluates_at_intervals_and_at_the_end(
    of_evaluated: ReadyTrainer, tmp_path: Path
) -> None:
    steps = {"train_steps": 10, "validation_interval": 4}
    config = _EVALUATED.replace(trainer={**steps, "steps_per_loop": 4, "summary_interval": 4})
    trainer = of_evaluated.again(tmp_path)

    _, logs = _run(tmp_path, "train_and_eval", config, trainer=trainer)

    assert _list_steps(tmp_path, "validation") == [4, 8, 10]
    assert _read_tags(tmp_path / "validation")["accuracy"] == [4, 8, 10]

    ledger = json_lines(tmp_path / "evals" / "validation.jsonl")
    assert [record["step"] for record in ledger] == [4, 8, 10]

    best = read_json(tmp_path / "best_ckpt" / "info.json")
    assert (
        best["value"]
        == max(record["metrics"]["accuracy"] for record in ledger)
        == pytest.approx(logs["best_accuracy"])
    )


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(
    of_trained: ReadyTrainer, trained_run: Path, tmp_path: Path
) -> None:
    config = _TRAINED.replace(trainer={"train_steps": 30})
    straight, _ = _run(tmp_path / "straight", config=config, trainer=of_trained.again())
    resumed, _ = launch(config, "train", str(trained_run))

    assert_all_close(_read_weights(resumed), _read_weights(straight))
    assert _list_steps(trained_run, "train")[-1] == 30


def test_profiled_steps_are_traced_and_add_two_reports(
    of_trained: ReadyTrainer, once_trained: Path, tmp_path: Path
) -> None:
    # Over the ends of two loops.
    _run(tmp_path, config=_TRAINED, profile="4:11", trainer=of_trained.again())

    assert times_traced(tmp_path / "train", "SparseSoftmaxCrossEntropyWithLogits") == 8
    assert _list_steps(tmp_path, "train") == sorted({*_list_steps(once_trained, "train"), 3, 11})

    differences = compare_runs(once_trained, tmp_path)
    assert differences
    assert all("metrics.jsonl" in line or "_OBJECT_GRAPH" in line for line in differences)
    assert final_record(tmp_path)["time"]["trace"] > 0


def test_a_finished_run_returns_its_final_metrics_and_says_so(
    of_evaluated: ReadyTrainer, evaluated_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = final_record(evaluated_run)["metrics"]
    history = (evaluated_run / "metrics.jsonl").read_text()

    with caplog.at_level("INFO", logger="trainer_kit"):
        _, second = _run(
            evaluated_run, "train_and_eval", _EVALUATED, trainer=of_evaluated.again(evaluated_run)
        )

    assert second == pytest.approx(metrics)
    assert "nothing to do" in caplog.text
    assert read_active_history(str(evaluated_run / "metrics.jsonl"))
    assert history in (evaluated_run / "metrics.jsonl").read_text()


class _LeavesTheFolder(Callback):
    """Changes the working directory at the start of the training, as user code may."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def train_begin(self, run: Run) -> None:
        os.chdir(self._folder)


def test_a_run_stays_in_its_folder_after_os_chdir(
    linear: ReadyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)

    _run(Path("run"), "train_and_eval", trainer=linear.again(), callbacks=[_LeavesTheFolder(other)])

    assert os.listdir(other) == []
    assert final_record(tmp_path / "run")["step"] == linear_experiment().trainer.train_steps

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    _, logs = _run(Path("~/run"), "train_and_eval", trainer=linear.again())

    assert logs.keys() == {"accuracy", "validation_loss"}
    assert not (tmp_path / "~").exists()


def test_eval_scores_the_checkpoint_that_it_is_told_to(
    evaluated_run: Path, evaluator: Trainer
) -> None:
    params_time = (evaluated_run / "params.yaml").stat().st_mtime_ns
    ledger = json_lines(evaluated_run / "evals" / "validation.jsonl")
    losses = {record["step"]: record["metrics"]["validation_loss"] for record in ledger}
    best = read_json(evaluated_run / "best_ckpt" / "info.json")

    for which, step in ((str(evaluated_run / "ckpt-40"), 40), ("best", best["step"])):
        _, logs = _run(evaluated_run, "eval", _EVALUATED, checkpoint=which, trainer=evaluator)
        assert logs["validation_loss"] == pytest.approx(losses[step], abs=1e-6)

    assert logs["accuracy"] == pytest.approx(best["value"], abs=1e-6)
    assert (evaluated_run / "params.yaml").stat().st_mtime_ns == params_time


def test_post_evaluation_returns_metrics_and_writes_summaries(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    _, logs = _run(tmp_path, "train_and_post_eval", trainer=linear.again())

    assert logs["validation_loss"] > 0
    assert _read_tags(tmp_path / "validation")["loss"] == [20]

    _, same = _run(tmp_path, "train", run_post_eval=True, trainer=linear.again())
    assert same["validation_loss"] == logs["validation_loss"]


def test_unknown_modes_and_a_missing_model_dir_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean train_and_eval"):
        run_experiment(None, None, "train_eval", linear_experiment(), "anywhere")

    with pytest.raises(ValueError, match="model_dir must be specified"):
        run_experiment(None, None, "train", linear_experiment(), None)  # type: ignore[arg-type]


def test_a_resumed_run_uses_the_configs_new_learning_rate(trained_run: Path) -> None:
    rate = {"type": "constant", "constant": {"learning_rate": 0.25}}  # in place of 0.01
    rates: list[Any] = []
    changed = {"optimizer_config": {"learning_rate": rate}, "train_steps": 27}
    record_rate = [lambda loop: rates.append(loop["learning_rate"])]

    _run(trained_run, config=_TRAINED.replace(trainer=changed), train_actions=record_rate)

    assert rates == [0.25] * 2


def test_a_learning_rate_set_in_a_ready_made_trainer_stays(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    config = linear_experiment(train_steps=10)
    trainer = linear.again()
    change = [lambda logs: trainer.optimizer.learning_rate.assign(0.125)]

    model, _ = run_experiment(
        None, trainer.task, "train", config, str(tmp_path), trainer=trainer, train_actions=change
    )

    assert model is trainer.model
    assert int(trainer.global_step) == 10

    rates: list[Any] = []
    config = config.replace(trainer={"train_steps": 20})
    record_rate = [lambda loop: rates.append(loop["learning_rate"])]
    _run(tmp_path, config=config, train_actions=record_rate, trainer=linear.again())

    assert rates == [0.125, 0.125]


def test_batch_size_may_change_when_it_is_allowed(trained_run: Path) -> None:
    data = {"train_data": {"global_batch_size": 16}}
    changed = _TRAINED.replace(trainer={"train_steps": 25}, task=data)

    with pytest.raises(ConfigError, match="global_batch_size"):
        _run(trained_run, config=changed)

    _run(trained_run, config=changed, allow_config_change=["task.train_data.global_batch_size"])

    assert _list_steps(trained_run, "train")[-1] == 25


def _change_labels(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    """Changes one label of the training or the validation data of runs that follow."""

    def arrays(of_training: bool, examples: int) -> tuple[np.ndarray, np.ndarray]:
        points, labels = tiny_arrays(of_training, examples)
        changed = labels.copy()
        changed[3] += of_training == training
        return points, changed

    monkeypatch.setattr("trainer_kit.testing.tiny_task.tiny_arrays", arrays)


def test_other_training_data_is_refused(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _change_labels(monkeypatch, training=True)
    advice = r"array 1 was int32 .*--allow_config_change=task\.train_data\.identity"

    with pytest.raises(UsageError, match=rf"^task\.train_data: the data has changed .*{advice}"):
        _run(trained_run, config=_TRAINED.replace(trainer={"train_steps": 25}))


def test_other_training_data_is_the_runs_once_it_is_allowed(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change_labels(monkeypatch, training=True)
    longer = _TRAINED.replace(trainer={"train_steps": 25})
    _run(trained_run, config=longer, allow_config_change=["task.train_data.identity"])
    _run(trained_run, config=longer)
    monkeypatch.undo()

    # Although the run is finished.
    with pytest.raises(UsageError, match=r"task\.train_data: the data has changed"):
        _run(trained_run, config=longer)


def test_a_finished_run_needs_no_data(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_files(of_training: bool, examples: int) -> Any:
        raise DataError("the files are gone")

    monkeypatch.setattr("trainer_kit.testing.tiny_task.tiny_arrays", lose_files)
    _run(trained_run, config=_TRAINED)

    with pytest.raises(DataError, match="the files are gone"):
        _run(trained_run, config=_TRAINED.replace(trainer={"train_steps": 25}))


class _Replacing(Callback):
    """Puts the folder of another run in the place of the run's own after the first loop."""

    def __init__(self, other: Path) -> None:
        self._other = other

    def loop_end(self, run: Run, logs: dict[str, Any]) -> None:
        if self._other.exists():
            folder = Path(run.directory)
            folder.rename(folder.with_name("moved"))
            self._other.rename(folder)


def test_a_run_never_saves_into_the_folder_of_another_run(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    config = linear_experiment(train_steps=20, checkpoint_interval=20)
    _run(tmp_path / "other", config=config, trainer=linear.again())
    longer = config.replace(trainer={"train_steps": 40, "checkpoint_interval": 40})
    arguments: dict[str, Any] = {
        "callbacks": [_Replacing(tmp_path / "other")],
        "enable_async_checkpointing": True,
        "trainer": linear.again(),
    }

    with pytest.raises(StorageError, match=rf"{tmp_path}/run contains another run now"):
        _run(tmp_path / "run", config=longer, **arguments)

    assert list(complete_checkpoints(str(tmp_path / "run"))) == [20]
    assert not list(complete_checkpoints(str(tmp_path / "moved")))


@pytest.mark.parametrize("point", ["checkpoint.save", "checkpoint.written"])
def test_a_folder_moved_during_a_save_is_not_made_again(
    linear: ReadyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def move(reached: str, path: object) -> None:
        if reached == point and "ckpt-20" in str(path):
            (tmp_path / "run").rename(tmp_path / "moved")

    monkeypatch.setattr(files, "report_write_point", move)

    with pytest.raises(StorageError, match=rf"{tmp_path}/run was moved or removed during the run"):
        _run(tmp_path / "run", trainer=linear.again(), enable_async_checkpointing=True)

    assert not (tmp_path / "run").exists()
    assert list(complete_checkpoints(str(tmp_path / "moved"))) == [10]


def test_other_validation_data_is_refused(
    evaluated_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change_labels(monkeypatch, training=False)

    with pytest.raises(
        UsageError, match=r"^task\.validation_data: .*task\.validation_data\.identity"
    ):
        _run(evaluated_run, "train_and_eval", _EVALUATED)


def test_a_run_of_an_earlier_release_takes_any_data(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch, of_trained: ReadyTrainer
) -> None:
    manifest = read_json(trained_run / "manifest.json")
    for name in ("data", "replicas", "workers", "device"):
        del manifest[name]
    (trained_run / "manifest.json").write_text(json.dumps(manifest))
    _change_labels(monkeypatch, training=True)
    exact = _TRAINED.replace(trainer={"require_exact_resume": True})

    _run(trained_run, config=exact, trainer=of_trained.again())

    assert _list_steps(trained_run, "train")[-1] == 17


def test_exactness_needs_the_versions_and_devices_of_before(trained_run: Path) -> None:
    manifest = read_json(trained_run / "manifest.json")

    assert manifest["replicas"] == 1
    assert manifest["workers"] == 1
    assert manifest["device"] == "CPU"

    manifest |= {"replicas": 2, "workers": 3, "device": "GPU", "python": "3.1"}
    manifest["packages"]["keras"] = "1.0"
    manifest["modules"]["tests/engine/linear_task.py"] = "0123456789abcdef"
    (trained_run / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(UsageError) as refused:
        _run(
            trained_run,
            config=_TRAINED.replace(trainer={"require_exact_resume": True, "train_steps": 25}),
        )

    lines = str(refused.value).split("\n")[1:]
    assert [line.split(": ")[1] for line in lines] == [
        "python",
        "packages",
        "replicas",
        "workers",
        "device",
        "code",
    ]
    assert "tests/engine/linear_task.py changed" in lines[-1]
    assert "replicas: 2 when the run was started, 1 now; go back, or set it to false" in lines[2]


def test_a_resume_with_other_code_warns_once(
    trained_run: Path, of_trained: ReadyTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = read_json(trained_run / "manifest.json")
    manifest["modules"]["tests/engine/linear_task.py"] = "0123456789abcdef"
    (trained_run / "manifest.json").write_text(json.dumps(manifest))

    for steps in (18, 19):
        config = _TRAINED.replace(trainer={"train_steps": steps})
        _run(trained_run, config=config, trainer=of_trained.again())

    assert caplog.text.count("code: tests/engine/linear_task.py changed since the last start") == 1
    start = read_json(trained_run / "manifest.json")["starts"][-1]
    assert start["host"] == socket.gethostname()


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file, not a folder"):
        _run(tmp_path / "file" / "run")


class _SummarisingTask(LinearTask):
    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        logs = super().train_step(inputs, model, optimizer, metrics)
        tf.summary.scalar("mine", logs[self.loss])
        return logs

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        logs = super().validation_step(inputs, model, metrics)
        tf.summary.scalar("mine_too", logs[self.loss])
        return logs


def test_the_tasks_summaries_keep_the_interval_of_the_config(tmp_path: Path) -> None:
    config = linear_experiment(summary_interval=10)
    task = _SummarisingTask(config.task)

    def write_scalar(logs: Any) -> None:
        tf.summary.scalar("of_an_action", logs["training_loss"])

    actions = [write_scalar]
    run_experiment(None, task, "train_and_eval", config, str(tmp_path), train_actions=actions)

    train = _read_tags(tmp_path / "train")
    validation = _read_tags(tmp_path / "validation")
    assert train["mine"] == [0, 10]  # the step before global_step moves on, as Orbit has it
    assert set(validation["mine_too"]) == {10, 20}
    assert train["of_an_action"] == [5, 10, 15, 20]
    assert "mine_too" not in train


def test_save_summary_false_writes_no_event_file(linear: ReadyTrainer, tmp_path: Path) -> None:
    _run(tmp_path, "train_and_eval", save_summary=False, trainer=linear.again())

    assert not list(tmp_path.rglob("events.out.tfevents.*"))
    assert _list_steps(tmp_path, "train") == [5, 10, 15, 20]


def test_any_orbit_controller_can_drive_the_trainer(
    orbit: Any, linear: ReadyTrainer, tmp_path: Path
) -> None:
    class OrbitsOwn(orbit.Controller):
        used = 0

        def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
            type(self).used += 1
            super().train(steps, checkpoint_at_completion)

    # The default.
    intervals = {"validation_interval": 6, "checkpoint_interval": 6, "summary_interval": 1000}
    config = linear_experiment(train_steps=12, steps_per_loop=3, **intervals)

    _run(tmp_path, "train_and_eval", config, controller_cls=OrbitsOwn, trainer=linear.again())

    assert OrbitsOwn.used == 2
    assert 12 in complete_checkpoints(str(tmp_path))
    assert _read_tags(tmp_path / "train")["training_loss"] == [3, 6, 9, 12]


class _FailsAtTheEnd(Callback):
    """Saves what callbacks have seen of each evaluation, and fails after the last one."""

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        run.save(overwrite=True)

    def train_end(self, run: Run) -> None:
        raise RuntimeError("the run fails")


def test_a_restart_returns_the_recorded_logs_of_its_last_step(
    orbit: Any, once_evaluated: Path, of_evaluated: ReadyTrainer, tmp_path: Path
) -> None:
    failed = tmp_path / "failed"
    trainer = of_evaluated.again(failed)
    with pytest.raises(RuntimeError, match="the run fails"):
        _run(failed, "train_and_eval", _EVALUATED, trainer=trainer, callbacks=[_FailsAtTheEnd()])

    for controller_class in (Controller, orbit.Controller):
        folder = tmp_path / controller_class.__module__
        shutil.copytree(failed, folder)
        own: dict[str, Any] = {
            "trainer": of_evaluated.again(folder),
            "controller_cls": controller_class,
        }

        _, logs = _run(folder, "train_and_eval", _EVALUATED, **own)

        assert "best_accuracy" in logs
        assert logs == final_record(folder)["metrics"] == final_record(once_evaluated)["metrics"]


def test_a_rewind_by_an_action_keeps_the_bits_and_records(
    once_evaluated: Path,
    of_evaluated: ReadyTrainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    controllers: list[Controller] = []

    class RecordedController(Controller):
        def __init__(self, **parts: Any) -> None:
            controllers.append(self)
            super().__init__(**parts)

    def go_back_once(logs: Any) -> None:
        manager = controllers[0].checkpoint_manager
        step = int(controllers[0].global_step.numpy())
        if step == 55 and "taken the run back" not in caplog.text:
            manager.sync()
            # Of which our engine knows nothing.
            tf.train.Checkpoint.read(manager.checkpoint, manager.find_newest())

    own: dict[str, Any] = {
        "controller_cls": RecordedController,
        "trainer": of_evaluated.again(tmp_path),
    }

    _run(tmp_path, "train_and_eval", _EVALUATED, train_actions=[go_back_once], **own)

    assert "an action has taken the run back from step 55 to step 40" in caplog.text

    differences = compare_runs(str(once_evaluated), str(tmp_path))
    # The ledger alone tells that there was a return.
    assert [line for line in differences if '"lineage": 1' not in line] == []


def test_recovery_with_an_orbit_controller_is_refused(orbit: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"trainer\.recovery_max_trials: Controller cannot rewind the run"
    ):
        _run(
            tmp_path,
            config=linear_experiment(recovery_max_trials=1),
            controller_cls=orbit.Controller,
        )


def test_a_profile_with_an_orbit_controller_is_refused(orbit: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--profile: Controller does not end its loops"):
        _run(tmp_path, config=linear_experiment(), controller_cls=orbit.Controller, profile="2:3")


class _FiniteTask(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return tf.data.Dataset.from_tensor_slices(tiny_arrays(bool(params.is_training))).batch(8)


@pytest.fixture(scope="module")
def finite() -> ReadyTrainer:
    return ReadyTrainer(linear_experiment(), _FiniteTask)


def test_train_steps_minus_one_trains_until_the_data_ends(
    finite: ReadyTrainer, tmp_path: Path
) -> None:
    _run(tmp_path, "train_and_eval", linear_experiment(train_steps=-1), trainer=finite.again())

    assert final_record(tmp_path)["step"] == 13
    assert list(complete_checkpoints(str(tmp_path)))[-1] == 13


def test_data_that_ends_too_early_is_a_data_error_after_saving(
    finite: ReadyTrainer, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError,
        match=r"ended at step 13 of 20; repeat the data .*, or set trainer\.train_steps to -1",
    ):
        _run(tmp_path, trainer=finite.again())

    assert list(complete_checkpoints(str(tmp_path)))[-1] == 13
    assert not (tmp_path / "final.json").exists()


def _stop(caplog: pytest.LogCaptureFixture) -> None:
    """Sends SIGTERM to this process, and waits until the run has been asked to stop."""
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 30
    while "SIGTERM: stopping" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)


class _FilteredAwayTask(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return (
            super()
            .build_inputs(params, input_context)
            .at(0)
            .take(9)
            .filter(lambda points, labels: False)
        )


def test_a_run_whose_data_turns_out_empty_leaves_no_record(tmp_path: Path) -> None:
    config = linear_experiment()

    with pytest.raises(DataError, match=r"task\.train_data has no batch"):
        run_experiment(None, _FilteredAwayTask(config.task), "train", config, str(tmp_path))

    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not left & {"params.yaml", "manifest.json", "metrics.jsonl", "final.json", "checkpoint"}


def test_a_stop_does_not_save_when_the_config_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = linear_experiment(preemption_on_demand_checkpoint=False)
    caplog.set_level("INFO", logger="trainer_kit")

    with pytest.raises(PreemptedError):
        _run(tmp_path, config=config, train_actions=[lambda logs: _stop(caplog)])

    assert not complete_checkpoints(str(tmp_path))
    assert any(message.startswith("time of this process: ") for message in caplog.messages)


class _StoppedInEvaluation(LinearTask):
    """Gets SIGTERM in its first evaluation, from what is in `stops`."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        if not state and stops:
            stops.pop()()
        return True

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        return {"step": float(global_step)}


stops: list[Callable[[], None]] = []


def test_the_next_start_repeats_an_interrupted_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = linear_experiment(train_steps=20, validation_interval=20, **_BEST)
    task = _StoppedInEvaluation(config.task)
    stops[:] = [lambda: _stop(caplog)]

    with pytest.raises(PreemptedError):
        run_experiment(None, task, "train_and_eval", config, str(tmp_path))

    assert _list_steps(tmp_path, "validation") == []

    _, logs = run_experiment(None, task, "train_and_eval", config, str(tmp_path))
    assert logs["step"] == 20
    assert final_record(tmp_path)["metrics"]["accuracy"] == logs["accuracy"]
    assert (tmp_path / "best_ckpt/ckpt-20.index").exists()
    assert _list_steps(tmp_path, "validation") == [20]


class _EvaluatesItself(Callback):
    """Evaluates one batch after each loop, as a callback may; the run does not record that."""

    def loop_end(self, run: Run, logs: Any) -> None:
        self.trainer = run.trainer
        self.trainer.evaluate(tf.constant(1))


def test_only_recorded_evaluations_are_exported_as_best(tmp_path: Path) -> None:
    config = linear_experiment(train_steps=10, steps_per_loop=5, validation_interval=10, **_BEST)
    callback = _EvaluatesItself()

    _run(tmp_path, "train_and_eval", config, callbacks=[callback])

    assert list(complete_checkpoints(str(tmp_path / "best_ckpt"))) == [10]
    assert callback.trainer.checkpoint_exporter is None  # the run exports


class _BackAfterEvaluation(Callback):
    """Takes the run back once, after its first evaluation."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def evaluation_end(self, run: Run, logs: Any) -> None:
        if not self.steps:
            run.rewind(10, "to try again")

    def rewound(self, run: Run, step: int) -> None:
        self.steps.append(step)


def test_a_rewind_after_the_last_evaluation_trains_on(
    of_evaluated: ReadyTrainer, tmp_path: Path
) -> None:
    config = _EVALUATED.replace(trainer={"train_steps": 20, "checkpoint_interval": 10})
    callback = _BackAfterEvaluation()
    trainer = of_evaluated.again(tmp_path)

    _, logs = _run(tmp_path, "train_and_post_eval", config, trainer=trainer, callbacks=[callback])

    assert callback.steps == [10]
    assert "accuracy" in logs
    assert _list_steps(tmp_path, "train") == [5, 10, 15, 20]
    assert _list_steps(tmp_path, "validation") == [20]
    assert final_record(tmp_path)["step"] == 20
    assert read_json(tmp_path / "best_ckpt" / "info.json")["step"] == 20


def test_mode_eval_evaluates_once_and_refuses_a_rewind(
    of_trained: ReadyTrainer, trained_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = _BackAfterEvaluation()
    evaluations: list[Any] = []

    _, logs = _run(
        trained_run,
        "eval",
        _TRAINED,
        trainer=of_trained.again(),
        eval_actions=[evaluations.append],
        callbacks=[callback],
        run_post_eval=True,
    )

    assert len(evaluations) == 1
    assert "accuracy" in logs
    assert callback.steps == []
    assert "asked to go back to step 10, in a mode that does not train" in caplog.text


def test_train_and_eval_evaluates_a_run_that_only_trained(
    of_trained: ReadyTrainer, trained_run: Path
) -> None:
    _, logs = _run(trained_run, "train_and_eval", _TRAINED, trainer=of_trained.again())

    assert "accuracy" in logs


def test_the_ledger_names_checkpoints_that_exist(evaluated_run: Path, evaluator: Trainer) -> None:
    ledger = evaluated_run / "evals/validation.jsonl"
    events = sorted((evaluated_run / "validation").iterdir())

    records = json_lines(ledger)

    assert [line["step"] for line in records] == [10, 20, 30, 40, 50, 60]
    assert [line["checkpoint"] for line in records] == [
        None,
        "ckpt-20",
        None,
        "ckpt-40",
        None,
        "ckpt-60",
    ]

    _, logs = _run(evaluated_run, "eval", _EVALUATED, checkpoint="20", trainer=evaluator)
    (record,) = json_lines(evaluated_run / "evals/eval.jsonl")

    loss = records[1]["metrics"]["validation_loss"]
    assert logs["validation_loss"] == pytest.approx(loss, abs=1e-6)
    assert record["step"] == 20
    assert record["checkpoint"] == "ckpt-20"
    assert json_lines(ledger) == records
    assert sorted((evaluated_run / "validation").iterdir()) == events


def test_one_replica_evaluates_a_checkpoint_of_several_equally(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    config = linear_experiment().replace(runtime={"virtual_cpus": 2})
    _, several = _run(tmp_path, "train_and_eval", config)
    _, on_one_replica = _run(tmp_path, "eval", trainer=linear.again())

    assert on_one_replica == pytest.approx(several, abs=1e-6)


def test_each_validation_set_has_its_interval_records_and_curves(tmp_path: Path) -> None:
    config = linear_experiment(validation_interval=5, best_checkpoint_eval_metric="dev|accuracy")
    data = config.task.validation_data
    config = config.replace(
        task={"validation_data": {"dev": data, "rare": data.replace(global_batch_size=7)}},
        trainer={"validation_sets": {"rare": {"interval": 15, "steps": 2}}},
    )
    lines: list[str] = []

    class Lines(ConsoleWriter):
        def log(self, text: str) -> None:
            lines.extend(text.splitlines())

    keras.utils.clear_session()
    ready = ReadyTrainer(config, LinearTask)
    straight = tmp_path / "straight"
    _, logs = _run(
        straight,
        "train_and_eval",
        config,
        console=Lines(io.StringIO()),
        trainer=ready.again(straight),
    )

    records = json_lines(straight / "evals/validation.jsonl")
    steps = {
        name: [item["step"] for item in records if item["dataset"] == name]
        for name in ("dev", "rare")
    }
    assert steps == {"dev": [5, 10, 15, 20], "rare": [15, 20]}
    assert all(list(item["metrics"]) == [item["dataset"]] for item in records)
    assert {name: _read_tags(straight / "validation" / name)["accuracy"] for name in steps} == steps
    assert [line.split(" | ")[:2] for line in lines if line.startswith("validation")][-3:] == [
        ["validation rare", "step 15/20"],
        ["validation dev", "step 20/20"],
        ["validation rare", "step 20/20"],
    ]

    accuracies = {
        item["step"]: item["metrics"]["dev"]["accuracy"]
        for item in records
        if item["dataset"] == "dev"
    }
    best_step = max(accuracies, key=accuracies.__getitem__)
    assert read_json(straight / "best_ckpt/info.json")["step"] == best_step
    assert f"best accuracy {accuracies[best_step]:.4g} at step {best_step}" in lines[-2]

    resumed = tmp_path / "resumed"
    shorter = config.replace(trainer={"train_steps": 15})

    _run(resumed, "train_and_eval", shorter, trainer=ready.again(resumed))
    keras.utils.clear_session()
    # With a trainer of its own, as in a new process.
    _, again = _run(resumed, "train_and_eval", config)

    assert again == logs
    assert compare_runs(straight, resumed) == []
    assert _run(resumed, "eval", config, trainer=ready.again())[1]["rare"] == logs["rare"]


def test_a_run_at_its_last_step_evaluates_new_sets_only(tmp_path: Path) -> None:
    config = linear_experiment(train_steps=10)
    data = config.task.validation_data
    batches = []
    _, first = _run(
        tmp_path,
        "train_and_eval",
        config.replace(task={"validation_data": {"dev": data, "old": data}}),
    )
    (tmp_path / "final.json").unlink()  # as if it had been killed before
    config = config.replace(task={"validation_data": {"dev": data, "new": data}})

    _, logs = _run(
        tmp_path, "train_and_eval", config, eval_actions=[lambda logs: batches.append([*logs])]
    )

    assert logs == {"dev": first["dev"], "new": pytest.approx(first["old"])}
    assert batches == [["new"]]


def test_a_run_killed_before_its_final_record_writes_the_same(evaluated_run: Path) -> None:
    before = final_record(evaluated_run)
    (evaluated_run / "final.json").unlink()
    _, logs = _run(evaluated_run, "train_and_eval", _EVALUATED)

    after = final_record(evaluated_run)

    assert logs == after["metrics"] == before["metrics"]
    assert "best_accuracy" in logs
    assert after["best"] == before["best"]


class _WaitsForData(LinearTask):
    """Batches that come slowly once `wait` is set, the seconds for each."""

    wait = 0.0

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        def slow(*batch: Any) -> Any:
            tf.py_function(lambda: time.sleep(self.wait), [], [])
            return batch

        points = tf.data.Dataset.from_tensor_slices(tiny_arrays(bool(params.is_training)))
        return points.repeat().batch(8, drop_remainder=True).map(slow)


def test_a_run_that_waits_for_data_is_told_so(tmp_path: Path) -> None:
    config = linear_experiment(train_steps=20).replace(
        task={"train_data": {"prefetch_buffer_size": 0}}
    )
    task = _WaitsForData(config.task)
    begin = time.monotonic()

    def begin_to_wait(logs: Any) -> None:
        # Fifteen batches take longer than the start did.
        task.wait = task.wait or (time.monotonic() - begin) / 8

    run_experiment(None, task, "train", config, str(tmp_path), train_actions=[begin_to_wait])

    assert final_record(tmp_path)["time"]["verdict"].startswith("input")


class _NotingTracker(Tracker):
    """Notes the steps that it gets, and how the run ended."""

    name = "noting"

    def __init__(self) -> None:
        self.notes: list[int | str] = []

    def start(self, tracked_run: TrackedRun) -> None:
        pass

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        self.notes += [step for step, _ in reports]

    def finish(self, end_state: EndState) -> None:
        self.notes.append(end_state)


def test_two_trackers_of_one_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the tracker noting is given twice; keep one"):
        _run(tmp_path, callbacks=[_NotingTracker(), _NotingTracker()])


class _EndsEarly(Callback):
    def __init__(self, step: int, error: Exception | None = None) -> None:
        self.step = step
        self.error = error

    def boundary_end(self, run: Run) -> None:
        if run.step != self.step:
            return
        if self.error is not None:
            raise self.error
        run.trainer.request_stop()


def test_a_tracker_gets_all_reports_however_a_start_ends(
    linear: ReadyTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = linear_experiment(train_steps=20, checkpoint_interval=5)
    tracker = _NotingTracker()
    # The program has called mlflow.tensorflow.autolog().
    mlflow = types.SimpleNamespace(autologging_is_disabled=lambda library: library != "tensorflow")
    monkeypatch.setitem(sys.modules, "mlflow.utils.autologging_utils", mlflow)

    with pytest.raises(PreemptedError):
        _run(tmp_path, config=config, callbacks=[tracker, _EndsEarly(10)])
    (warning,) = [text for text in caplog.messages if "mlflow.tensorflow.autolog()" in text]
    assert "give the run the callback" in warning
    with pytest.raises(RuntimeError, match="the disk of the user"):
        error = RuntimeError("the disk of the user")
        callbacks = [tracker, _EndsEarly(15, error)]
        _run(tmp_path, config=config, callbacks=callbacks, trainer=linear.again())
    for _ in range(2):
        _run(tmp_path, config=config, callbacks=[tracker], trainer=linear.again())

    assert tracker.notes == [5, 10, "stopped", 15, "failed", 20, "done"]
