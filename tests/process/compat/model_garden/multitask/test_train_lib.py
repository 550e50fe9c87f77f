"""Their train_lib beside ours: the same seed and data, the same curves of each task. And what ours
adds to it.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from official.modeling.multitask import multitask
from official.modeling.multitask import train_lib as theirs

from tests.builders import replicas
from tests.engine.compat.model_garden.tiny import multi_task
from tests.engine.compat.model_garden.tiny.curves import read_curves
from tests.process.compat.model_garden.multitask import registered
from trainer_kit.compat.model_garden.multitask import train_lib as ours
from trainer_kit.errors import ConfigError, DataError, UsageError
from trainer_kit.runtime.determinism import seed_everything

CONFIGS = {"joint": multi_task.config_joint, "interleaving": multi_task.config_interleaving}


@dataclass(frozen=True)
class ReadyMade:
    """A run of ours with a trainer of the caller's: its folder, the model and trainer given, what
    is returned.
    """

    folder: Path
    model: Any
    trainer: Any
    result: Any


@pytest.fixture(scope="module")
def ready_made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> ReadyMade:
    """Trains in turns, and keeps the best."""
    folder, config = (
        tmp_path_factory.mktemp("interleaving") / "ours",
        best(in_order(CONFIGS["interleaving"](data))),
    )
    seed_everything(1)
    return ReadyMade(folder, *with_trainer(config, folder, "train_and_eval"))


@pytest.fixture(scope="module")
def pairs(
    data: Path, ready_made: ReadyMade, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """By kind, a folder with a run of theirs and one of ours that keep the best; to be read, or
    copied, only.
    """
    folders = {"joint": tmp_path_factory.mktemp("joint"), "interleaving": ready_made.folder.parent}
    for kind, folder in folders.items():
        run(theirs, best(in_order(CONFIGS[kind](data))), folder / "theirs")
    run(ours, best(in_order(CONFIGS["joint"](data))), folders["joint"] / "ours")
    return folders


def in_order(config: Any) -> Any:
    """The config, with data that are not shuffled: on several replicas the order would depend on
    the batches.
    """
    for routine in config.task.task_routines:
        routine.task_config.train_data.shuffle_buffer_size = 1
    return config


def best(config: Any) -> Any:
    """The config, with a best checkpoint by the error of one task."""
    config.override({"trainer": registered.BEST})
    return config


def run(
    train_lib: Any, config: Any, model_dir: Path, mode: str = "train_and_eval", **options: Any
) -> Any:
    """Runs several tasks, from the seed on."""
    seed_everything(1)
    strategy = options.pop("strategy", tf.distribute.get_strategy())
    with strategy.scope():
        task, model = multitask.MultiTask.from_config(config.task), multi_task.model()
    common = {
        "distribution_strategy": strategy,
        "task": task,
        "model": model,
        "mode": mode,
        "params": config,
    }
    return train_lib.run_experiment(**common, model_dir=str(model_dir), **options)


def run_separate(
    train_lib: Any, model_dir: Path, mode: str = "train_and_eval", **options: Any
) -> Any:
    """Trains one task and evaluates two."""
    config = registered.separate()
    seed_everything(1)
    tasks = {
        "train_task": registered.ToldTask(config.task),
        "eval_tasks": registered.eval_tasks(config),
    }
    common = {"distribution_strategy": tf.distribute.get_strategy(), "mode": mode, "params": config}
    return train_lib.run_experiment_with_multitask_eval(
        **tasks, **common, model_dir=str(model_dir), **options
    )


def assert_alike(one: Path, other: Path) -> None:
    """Asserts that the curves of two runs are the same."""
    expected, found = read_curves(one), read_curves(other)
    assert {50} < set(expected["train"]) and set(expected["validation"]) == {25, 50}
    for part, steps in expected.items():
        for step, values in steps.items():
            seen = found[part][step]
            assert {name: seen.get(name) for name in values} == pytest.approx(values, abs=1e-5), (
                part,
                step,
            )


def best_step(folder: Path) -> int:
    """The step of the best weights."""
    path = tf.train.latest_checkpoint(str(folder / "best_ckpt"))
    return int(tf.train.load_variable(path, "global_step/.ATTRIBUTES/VARIABLE_VALUE"))


def saved(path: str, *parts: str) -> dict[str, np.ndarray]:
    """The variables of some parts of a checkpoint, by name."""
    reader = tf.train.load_checkpoint(path)
    names = [name for name in reader.get_variable_to_shape_map() if name.partition("/")[0] in parts]
    return {name: np.asarray(reader.get_tensor(name)) for name in names}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_curves_of_each_task_are_theirs(kind: str, pairs: dict[str, Path]) -> None:
    assert_alike(pairs[kind] / "theirs", pairs[kind] / "ours")
    assert {f"{name}/training_loss" for name in multi_task.TASKS} < set(
        read_curves(pairs[kind] / "ours")["train"][50]
    )
    assert (
        best_step(pairs[kind] / "ours") == 50
    )  # theirs always tells 0: its evaluator makes a counter of its own
    ours_best, theirs_best = (
        saved(tf.train.latest_checkpoint(str(pairs[kind] / name / "best_ckpt")), "model")
        for name in ("ours", "theirs")
    )
    assert len(theirs_best) == 6
    for name, value in theirs_best.items():
        np.testing.assert_allclose(ours_best[name], value, rtol=1e-5, atol=1e-6)


def test_one_task_is_trained_and_others_evaluated_as_theirs(data: Path, tmp_path: Path) -> None:
    evaluated: list[list[str]] = []
    eval_actions = [lambda logs: evaluated.append(sorted(logs))]
    model, logs = run_separate(
        ours, tmp_path / "ours", run_post_eval=True, eval_actions=eval_actions
    )
    assert evaluated == [["all", "some"]] * 3
    _, expected = run_separate(theirs, tmp_path / "theirs", run_post_eval=True)
    assert_alike(tmp_path / "theirs", tmp_path / "ours")
    assert set(logs) == {"all", "some"}
    for name, metrics in expected.items():
        assert {key: logs[name][key] for key in metrics} == pytest.approx(
            {k: float(v) for k, v in metrics.items()}
        )
    assert model.trainable_variables
    assert best_step(tmp_path / "ours") == 50


def test_a_joint_run_goes_on_to_the_same_bits(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pairs["joint"] / "ours", tmp_path / "run"))
    for path in folder.glob("ckpt-50.*"):
        path.unlink()
    config = in_order(multi_task.config_joint(data))
    model, logs = run(ours, config, folder, run_post_eval=True)
    assert isinstance(model, multi_task.SharedModel)
    assert set(logs) == {"sum", "difference"}
    assert {"sum_error", "validation_loss"} <= set(logs["sum"])
    found, expected = (
        saved(str(one / "ckpt-50"), "model", "optimizer")
        for one in (folder, pairs["joint"] / "ours")
    )
    assert found.keys() == expected.keys() and len(found) > 6
    assert [
        name for name, value in expected.items() if found[name].tobytes() != value.tobytes()
    ] == []


def test_a_ready_made_trainer_is_used_and_keeps_the_best(ready_made: ReadyMade) -> None:
    trainer = ready_made.trainer
    assert ready_made.result is ready_made.model
    assert int(trainer.global_step.numpy()) == 50
    assert sum(int(trainer.task_step_counter(name).numpy()) for name in multi_task.TASKS) == 50
    assert best_step(ready_made.folder) == 50


def with_trainer(config: Any, model_dir: Path, mode: str, **options: Any) -> tuple[Any, Any, Any]:
    """Runs several tasks with a ready-made trainer; returns the model, the trainer, and what is
    returned.
    """
    task, model = multitask.MultiTask.from_config(config.task), multi_task.model()
    trainer = ours.get_trainer(tf.distribute.get_strategy(), config, task, model)
    strategy = tf.distribute.get_strategy()
    common = {
        "distribution_strategy": strategy,
        "task": task,
        "model": model,
        "mode": mode,
        "params": config,
    }
    return (
        model,
        trainer,
        ours.run_experiment(**common, model_dir=str(model_dir), trainer=trainer, **options),
    )


def state_of(folder: Path) -> dict[str, int]:
    """When each file of a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_checkpoint_has_their_root_keys_and_they_can_read_it(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    config = best(in_order(multi_task.config_interleaving(data)))
    folder = Path(shutil.copytree(pairs["interleaving"] / "ours", tmp_path / "ours"))
    (folder / "best_ckpt" / "info.json").unlink()  # an exporter of this folder would write it again
    before = state_of(folder / "best_ckpt")
    names = {name.partition("/")[0] for name, _ in tf.train.list_variables(str(folder / "ckpt-50"))}
    assert {"model", "optimizer", "global_step"} < names
    found = with_trainer(config, folder, "eval", eval_name="other", run_post_eval=True)[2][1]
    assert state_of(folder / "best_ckpt") == before and not [
        *folder.glob("evals/*/best_ckpt/info.json")
    ]
    logs = run(theirs, config, folder, mode="eval", run_post_eval=True)[1]
    for task, metrics in logs.items():
        assert found[task] == pytest.approx({name: float(value) for name, value in metrics.items()})


def test_a_ready_made_evaluating_trainer_has_a_best_of_its_own(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pairs["joint"] / "ours", tmp_path / "run"))
    (folder / "best_ckpt" / "info.json").unlink()
    before, config = state_of(folder / "best_ckpt"), best(in_order(multi_task.config_joint(data)))
    config.trainer.continuous_eval_timeout = 1
    with_trainer(config, folder, "continuous_eval", eval_name="other")
    assert state_of(folder / "best_ckpt") == before
    assert [path.parent.parent.name for path in folder.glob("evals/*/best_ckpt/info.json")] == [
        "other"
    ]


def test_on_several_replicas_the_curves_are_those_of_one(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    run(ours, best(in_order(multi_task.config_joint(data))), tmp_path, strategy=replicas(2))
    assert_alike(pairs["joint"] / "ours", tmp_path)


@pytest.mark.parametrize("part", ["train_data", "validation_data"])
def test_missing_data_is_reported_by_its_path_in_the_task(
    part: str, data: Path, tmp_path: Path
) -> None:
    config = multi_task.config_joint(data)
    getattr(config.task.task_routines[1].task_config, part).input_path = "no/*.tfrecord"
    path = f"task.task_routines.1.task_config.{part}"
    with pytest.raises(
        DataError, match=re.escape(f"{path}: ValueError: no/*.tfrecord does not match any files")
    ):
        run(ours, config, tmp_path)


def test_missing_data_of_a_task_that_is_only_evaluated_are_told(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate = registered.separate
    for path, kind in (("no/*.tfrecord", DataError), ("", UsageError)):
        config = separate()
        config.eval_tasks[1].task_config.validation_data.input_path = path
        monkeypatch.setattr(registered, "separate", lambda config=config: config)
        with pytest.raises(kind, match=r"^eval_tasks\.1\.task_config\.validation_data: "):
            run_separate(ours, tmp_path)


def test_what_is_missing_is_told(data: Path, tmp_path: Path) -> None:
    config = multi_task.config_joint(data)
    config.override({"trainer": {"trainer_type": "jiont"}})
    with pytest.raises(UsageError, match=r"there is no trainer type 'jiont'.*joint"):
        run(ours, config, tmp_path)
    with pytest.raises(UsageError, match="train_and_eval"):
        run(ours, config, tmp_path, "train_and_evaluate")
    theirs_one = theirs.base_trainer.MultiTaskBaseTrainer
    for mode, problem in (
        ("train", "has no strategy, config"),
        ("train_and_eval", "cannot evaluate several tasks"),
    ):
        with pytest.raises(UsageError, match=rf"MultiTaskBaseTrainer {problem}"):
            run(
                ours,
                multi_task.config_joint(data),
                tmp_path,
                mode,
                trainer=theirs_one.__new__(theirs_one),
            )
    config = best(multi_task.config_joint(data))
    config.override({"trainer": {"best_checkpoint_eval_metric": "sum_error"}})
    with pytest.raises(UsageError, match=r"sum\|sum_error"):
        run(ours, config, tmp_path)


def test_epochs_are_counted_in_the_data_of_the_trained_task(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = registered.separate()
    config.override({"trainer": {"train_steps": "1 epochs"}})
    monkeypatch.setattr(registered, "separate", lambda: config)
    with pytest.raises(ConfigError, match=r"trainer\.train_steps: .*task\.train_data has no end"):
        run_separate(ours, tmp_path)
