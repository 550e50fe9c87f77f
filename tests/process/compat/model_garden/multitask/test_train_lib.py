"""Their train_lib beside ours: the same seed and data, the same curves of each task. And what ours
adds to it. Theirs runs eagerly, which gives the same numbers without a trace.
"""

from __future__ import annotations

import contextlib
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
from tests.engine.compat.model_garden.garden_task import eagerly
from tests.engine.compat.model_garden.tiny import multi_task
from tests.engine.compat.model_garden.tiny.curves import read_curves
from tests.process.compat.model_garden.multitask import registered
from trainer_kit.compat.model_garden.multitask import train_lib as ours
from trainer_kit.errors import ConfigError, DataError, UsageError
from trainer_kit.runtime.determinism import seed_everything

CONFIGS = {"joint": multi_task.config_joint, "interleaving": multi_task.config_interleaving}


@dataclass(frozen=True)
class FinishedRun:
    """A run of ours with a trainer of the caller's: its folder, the model and trainer given, what
    is returned.
    """

    folder: Path
    model: Any
    trainer: Any
    result: Any


@pytest.fixture(scope="module")
def finished_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Trains in turns, and keeps the best."""
    folder = tmp_path_factory.mktemp("interleaving") / "ours"
    config = keep_best(read_in_order(CONFIGS["interleaving"](data)))
    seed_everything(1)
    return FinishedRun(folder, *run_with_trainer(config, folder, "train_and_eval"))


@pytest.fixture(scope="module")
def pairs(
    data: Path, finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """By kind, a folder with a run of theirs and one of ours that keep the best; to be read, or
    copied, only.
    """
    folders = {
        "joint": tmp_path_factory.mktemp("joint"),
        "interleaving": finished_run.folder.parent,
    }
    for kind, folder in folders.items():
        run(theirs, keep_best(read_in_order(CONFIGS[kind](data))), folder / "theirs")
    run(ours, keep_best(read_in_order(CONFIGS["joint"](data))), folders["joint"] / "ours")
    return folders


def read_in_order(config: Any) -> Any:
    """The config, with data that are not shuffled: on several replicas the order would depend on
    the batches.
    """
    for routine in config.task.task_routines:
        routine.task_config.train_data.shuffle_buffer_size = 1
    return config


def keep_best(config: Any) -> Any:
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
        task = multitask.MultiTask.from_config(config.task)
        model = multi_task.model()
    with eagerly() if train_lib is theirs else contextlib.nullcontext():
        return train_lib.run_experiment(
            distribution_strategy=strategy,
            task=task,
            model=model,
            mode=mode,
            params=config,
            model_dir=str(model_dir),
            **options,
        )


def run_separate(
    train_lib: Any, model_dir: Path, mode: str = "train_and_eval", **options: Any
) -> Any:
    """Trains one task and evaluates two."""
    config = registered.separate()
    seed_everything(1)
    with eagerly() if train_lib is theirs else contextlib.nullcontext():
        return train_lib.run_experiment_with_multitask_eval(
            distribution_strategy=tf.distribute.get_strategy(),
            train_task=registered.NotingTask(config.task),
            eval_tasks=registered.create_eval_tasks(config),
            mode=mode,
            params=config,
            model_dir=str(model_dir),
            **options,
        )


def assert_same_curves(expected_run: Path, run: Path) -> None:
    """Asserts that the curves of two runs are the same."""
    expected_curves = read_curves(expected_run)
    curves = read_curves(run)
    assert {50} < set(expected_curves["train"])
    assert set(expected_curves["validation"]) == {25, 50}
    for part, steps in expected_curves.items():
        for step, expected in steps.items():
            values = {name: curves[part][step].get(name) for name in expected}
            assert values == pytest.approx(expected, abs=1e-5), (part, step)


def best_step(folder: Path) -> int:
    """The step of the best weights."""
    path = tf.train.latest_checkpoint(str(folder / "best_ckpt"))
    return int(tf.train.load_variable(path, "global_step/.ATTRIBUTES/VARIABLE_VALUE"))


def read_variables(path: str, *parts: str) -> dict[str, np.ndarray]:
    """The variables of some parts of a checkpoint, by name."""
    reader = tf.train.load_checkpoint(path)
    names = [name for name in reader.get_variable_to_shape_map() if name.partition("/")[0] in parts]
    return {name: np.asarray(reader.get_tensor(name)) for name in names}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_curves_of_each_task_are_theirs(kind: str, pairs: dict[str, Path]) -> None:
    our_run = pairs[kind] / "ours"
    their_run = pairs[kind] / "theirs"

    assert_same_curves(their_run, our_run)
    names = read_curves(our_run)["train"][50]
    assert {f"{name}/training_loss" for name in multi_task.TASKS} < set(names)

    # Theirs always records step 0: its evaluator makes a counter of its own.
    assert best_step(our_run) == 50
    weights = read_variables(tf.train.latest_checkpoint(str(our_run / "best_ckpt")), "model")
    expected = read_variables(tf.train.latest_checkpoint(str(their_run / "best_ckpt")), "model")
    assert len(expected) == 6
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6)


def test_one_task_is_trained_and_others_evaluated_as_theirs(data: Path, tmp_path: Path) -> None:
    names_of_evaluations: list[list[str]] = []
    eval_actions = [lambda logs: names_of_evaluations.append(sorted(logs))]
    model, logs = run_separate(
        ours, tmp_path / "ours", run_post_eval=True, eval_actions=eval_actions
    )
    _, expected_logs = run_separate(theirs, tmp_path / "theirs", run_post_eval=True)

    assert names_of_evaluations == [["all", "some"]] * 3
    assert_same_curves(tmp_path / "theirs", tmp_path / "ours")
    assert set(logs) == {"all", "some"}
    for task, metrics in expected_logs.items():
        expected = {name: float(value) for name, value in metrics.items()}
        assert {name: logs[task][name] for name in expected} == pytest.approx(expected)
    assert model.trainable_variables
    assert best_step(tmp_path / "ours") == 50


def test_a_joint_run_goes_on_to_the_same_bits(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pairs["joint"] / "ours", tmp_path / "run"))
    for path in folder.glob("ckpt-50.*"):
        path.unlink()
    config = read_in_order(multi_task.config_joint(data))

    model, logs = run(ours, config, folder, run_post_eval=True)

    assert isinstance(model, multi_task.SharedModel)
    assert set(logs) == {"sum", "difference"}
    assert {"sum_error", "validation_loss"} <= set(logs["sum"])
    values = read_variables(str(folder / "ckpt-50"), "model", "optimizer")
    expected = read_variables(str(pairs["joint"] / "ours" / "ckpt-50"), "model", "optimizer")
    assert values.keys() == expected.keys()
    assert len(values) > 6
    for name, value in expected.items():
        assert values[name].tobytes() == value.tobytes(), name


def test_a_ready_made_trainer_is_used_and_keeps_the_best(finished_run: FinishedRun) -> None:
    trainer = finished_run.trainer
    assert finished_run.result is finished_run.model
    assert int(trainer.global_step.numpy()) == 50
    assert sum(int(trainer.task_step_counter(name).numpy()) for name in multi_task.TASKS) == 50
    assert best_step(finished_run.folder) == 50


def run_with_trainer(
    config: Any, model_dir: Path, mode: str, **options: Any
) -> tuple[Any, Any, Any]:
    """Runs several tasks with a ready-made trainer; returns the model, the trainer, and what is
    returned.
    """
    task = multitask.MultiTask.from_config(config.task)
    model = multi_task.model()
    strategy = tf.distribute.get_strategy()
    trainer = ours.get_trainer(strategy, config, task, model)
    result = ours.run_experiment(
        distribution_strategy=strategy,
        task=task,
        model=model,
        mode=mode,
        params=config,
        model_dir=str(model_dir),
        trainer=trainer,
        **options,
    )
    return model, trainer, result


def read_mtimes(folder: Path) -> dict[str, int]:
    """When each file of a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_checkpoint_has_their_root_keys_and_they_can_read_it(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    config = keep_best(read_in_order(multi_task.config_interleaving(data)))
    folder = Path(shutil.copytree(pairs["interleaving"] / "ours", tmp_path / "ours"))
    (folder / "best_ckpt" / "info.json").unlink()  # an exporter of this folder would write it again
    before = read_mtimes(folder / "best_ckpt")
    names = {name.partition("/")[0] for name, _ in tf.train.list_variables(str(folder / "ckpt-50"))}
    assert {"model", "optimizer", "global_step"} < names

    _, _, result = run_with_trainer(config, folder, "eval", eval_name="other", run_post_eval=True)
    _, logs = result
    assert read_mtimes(folder / "best_ckpt") == before
    assert not list(folder.glob("evals/*/best_ckpt/info.json"))

    _, expected_logs = run(theirs, config, folder, mode="eval", run_post_eval=True)
    for task, metrics in expected_logs.items():
        assert logs[task] == pytest.approx({name: float(value) for name, value in metrics.items()})


def test_a_ready_made_evaluating_trainer_has_a_best_of_its_own(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pairs["joint"] / "ours", tmp_path / "run"))
    (folder / "best_ckpt" / "info.json").unlink()
    before = read_mtimes(folder / "best_ckpt")
    config = keep_best(read_in_order(multi_task.config_joint(data)))
    config.trainer.continuous_eval_timeout = 1

    run_with_trainer(config, folder, "continuous_eval", eval_name="other")

    assert read_mtimes(folder / "best_ckpt") == before
    (info,) = folder.glob("evals/*/best_ckpt/info.json")
    assert info.parent.parent.name == "other"


def test_on_several_replicas_the_curves_are_those_of_one(
    data: Path, pairs: dict[str, Path], tmp_path: Path
) -> None:
    run(
        ours,
        keep_best(read_in_order(multi_task.config_joint(data))),
        tmp_path,
        strategy=replicas(2),
    )
    assert_same_curves(pairs["joint"] / "ours", tmp_path)


@pytest.mark.parametrize("part", ["train_data", "validation_data"])
def test_missing_data_is_reported_by_its_path_in_the_task(
    part: str, data: Path, tmp_path: Path
) -> None:
    config = multi_task.config_joint(data)
    getattr(config.task.task_routines[1].task_config, part).input_path = "no/*.tfrecord"

    path = f"task.task_routines.1.task_config.{part}"
    message = f"{path}: ValueError: no/*.tfrecord does not match any files"
    with pytest.raises(DataError, match=re.escape(message)):
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


def test_a_wrong_trainer_mode_or_metric_is_refused(data: Path, tmp_path: Path) -> None:
    config = multi_task.config_joint(data)
    config.override({"trainer": {"trainer_type": "jiont"}})
    with pytest.raises(UsageError, match=r"there is no trainer type 'jiont'.*joint"):
        run(ours, config, tmp_path)
    with pytest.raises(UsageError, match="train_and_eval"):
        run(ours, config, tmp_path, "train_and_evaluate")

    trainer_type = theirs.base_trainer.MultiTaskBaseTrainer
    for mode, problem in (
        ("train", "has no strategy, config"),
        ("train_and_eval", "cannot evaluate several tasks"),
    ):
        config = multi_task.config_joint(data)
        trainer = trainer_type.__new__(trainer_type)
        with pytest.raises(UsageError, match=rf"MultiTaskBaseTrainer {problem}"):
            run(ours, config, tmp_path, mode, trainer=trainer)

    config = keep_best(multi_task.config_joint(data))
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
