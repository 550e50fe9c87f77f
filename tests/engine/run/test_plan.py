"""What is decided about a run before anything is built, and which processes it keeps out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.callbacks.callback import Callback
from trainer_kit.callbacks.configured_callbacks import register_callback
from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ModelDirInUseError
from trainer_kit.run.plan import RunOptions, RunPlan, plan_run, resolve_plan
from trainer_kit.run.progress import Progress
from trainer_kit.testing import tiny_experiment


@register_callback("planned")
class _Registered(Callback):
    """Of a config."""


class _Given(Callback):
    """Of a caller."""


def _create_plan(
    folder: Path, mode: str = "train", config: ExperimentConfig | None = None, **options: Any
) -> RunPlan:
    return plan_run(None, mode, config or tiny_experiment(), str(folder), RunOptions(**options))


def test_callbacks_of_the_config_come_before_those_given(tmp_path: Path) -> None:
    config = tiny_experiment(callbacks=[{"name": "planned"}])
    plan = _create_plan(tmp_path, config=config, callbacks=[_Given()])

    assert [type(callback) for callback in plan.callbacks] == [_Registered, _Given]


@pytest.mark.parametrize(
    ("mode", "sets"), [("continuous_eval", ["test"]), ("train_and_eval", ["dev", "test"])]
)
def test_only_a_sidecar_leaves_out_validation_sets(
    tmp_path: Path, mode: str, sets: list[str]
) -> None:
    config = tiny_experiment()
    data = config.task.validation_data
    config = config.replace(
        task={"validation_data": {"dev": data, "test": data}},
        trainer={"continuous_eval": {"validation_sets": ["test"]}},
    )

    plan = _create_plan(tmp_path, mode, config)

    assert list(get_validation_sets(plan.config.task)) == sets


def test_a_folder_behind_a_link_is_planned_by_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert _create_plan(tmp_path / "link").directory.path == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("train", {}), ("train_and_eval", {})),
        (("continuous_eval", {"eval_name": "side"}), ("continuous_eval", {"eval_name": "side"})),
    ],
)
def test_a_second_run_of_the_same_files_is_refused(tmp_path: Path, first: Any, second: Any) -> None:
    with (
        _create_plan(tmp_path, first[0], **first[1]).create_lock(Progress()),
        pytest.raises(ModelDirInUseError),
    ):
        _create_plan(tmp_path, second[0], **second[1]).create_lock(Progress()).__enter__()


def test_evaluations_and_sidecars_run_beside_training(tmp_path: Path) -> None:
    tf.train.Checkpoint(step=tf.Variable(10)).write(str(tmp_path / "ckpt-10"))
    plans = [
        _create_plan(tmp_path, "train"),
        _create_plan(tmp_path, "eval"),
        _create_plan(tmp_path, "eval"),
    ]
    plans += [_create_plan(tmp_path, "continuous_eval", eval_name=name) for name in ("one", "two")]

    with contextlib.ExitStack() as locks:
        for plan in plans:
            locks.enter_context(plan.create_lock(Progress()))
        assert {"one.lock", "two.lock"} <= set(os.listdir(tmp_path / "evals"))


@pytest.mark.parametrize("mode", ["train", "continuous_eval"])
def test_a_run_that_fails_before_its_first_record_leaves_nothing(tmp_path: Path, mode: str) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        _create_plan(tmp_path / "run", mode).create_lock(Progress()),
    ):
        raise ZeroDivisionError

    assert os.listdir(tmp_path) == []


class _WithCallbacks:
    """A task with a callback of its own."""

    def build_callbacks(self) -> list[Callback]:
        return [_Registered()]


def test_callbacks_of_a_task_come_first_where_it_trains(tmp_path: Path) -> None:
    of_run = resolve_plan(_create_plan(tmp_path, callbacks=[_Given()]), _WithCallbacks()).callbacks

    assert [type(callback) for callback in of_run] == [_Registered, _Given]
    assert resolve_plan(_create_plan(tmp_path, "continuous_eval"), _WithCallbacks()).callbacks == []
    assert resolve_plan(_create_plan(tmp_path), object()).callbacks == []
