"""What lies in the folder of fine-tunings, and where their checkpoints may come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.process.finetune_directory import (
    find_pretraining_mistakes,
    get_finetune_dir,
    get_metrics_path,
    list_finished_steps,
    list_unfinished_steps,
)


def test_a_step_is_finished_when_its_metrics_exist(tmp_path: Path) -> None:
    assert list_finished_steps(str(tmp_path / "missing")) == []

    for step in (30, 4):
        Path(get_metrics_path(str(tmp_path), step)).write_text("{}")

    for name in ("metrics-7.json.bak", "metrics-x.json", "metrics.jsonl"):
        (tmp_path / name).write_text("")

    assert list_finished_steps(str(tmp_path)) == [4, 30]


def test_an_unfinished_step_has_a_checkpoint_and_no_metrics(tmp_path: Path) -> None:
    for step in (100, 20, 30, 40):
        Path(get_finetune_dir(str(tmp_path), step)).mkdir()
    for step in (100, 20, 30):
        (tmp_path / f"finetune-{step}/ckpt-5.index").write_text("")

    (tmp_path / "finetune-old").mkdir()
    (tmp_path / "metrics-30.json").write_text("{}")

    assert list_unfinished_steps(str(tmp_path)) == [20, 100]


@pytest.mark.parametrize(
    ("init_checkpoint", "problem"),
    [
        ("", "needs one folder here"),
        ([{"path": "{folder}/run"}], "needs one folder here"),
        ("gs://there/run", "is a remote folder"),
        ("{folder}/ckpt-10", "is not a folder"),
        ("{folder}/file", "is not a folder"),
        ("{folder}/run", "is --model_dir itself"),
    ],
)
def test_a_wrong_folder_of_the_pretraining_is_a_mistake(
    init_checkpoint: str | list[dict[str, str]], problem: str, tmp_path: Path
) -> None:
    for name in ("file", "ckpt-10.index"):
        (tmp_path / name).write_text("")
    if isinstance(init_checkpoint, str):
        init_checkpoint = init_checkpoint.format(folder=tmp_path)
    config = ExperimentConfig().replace(task={"init_checkpoint": init_checkpoint})

    (mistake,) = find_pretraining_mistakes(config, str(tmp_path / "run"))

    assert mistake.path == "task.init_checkpoint"
    assert problem in mistake.problem


def test_the_folder_of_the_pretraining_need_not_exist(tmp_path: Path) -> None:
    config = ExperimentConfig(task=TaskConfig(init_checkpoint=str(tmp_path / "yet/to/come")))
    assert find_pretraining_mistakes(config, str(tmp_path / "run")) == []
