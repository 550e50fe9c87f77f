"""What lies in the folder of fine-tunings, and where their checkpoints may come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.process.finetune_directory import FinetuneDirectory, pretraining_mistakes


def test_a_step_is_done_when_its_metrics_are_there(tmp_path: Path) -> None:
    directory = FinetuneDirectory(str(tmp_path))
    assert directory.done() == set()
    directory.write_metrics(30, {"step": 30, "metrics": {"accuracy": 0.5}})
    for name in ("metrics-7.json.bak", "metrics-x.json", "metrics.jsonl"):
        (tmp_path / name).write_text("")
    assert directory.done() == {30}
    assert directory.metrics(30) == {"accuracy": 0.5} and directory.metrics(7) == {}


def test_what_has_begun_has_a_checkpoint_and_no_metrics(tmp_path: Path) -> None:
    directory = FinetuneDirectory(str(tmp_path))
    for step in (100, 20, 30, 40):
        Path(directory.run(step)).mkdir()
    for step in (100, 20, 30):
        (tmp_path / f"finetune-{step}/ckpt-5.index").write_text("")
    (tmp_path / "finetune-old").mkdir()
    directory.write_metrics(30, {})
    assert directory.begun() == {20: f"{tmp_path}/finetune-20", 100: f"{tmp_path}/finetune-100"}
    assert list(directory.begun()) == [20, 100]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("", "is needed in mode"),
        ("gs://there/run", "is a remote folder"),
        ("{folder}/ckpt-10", "is not a folder"),
        ("{folder}/file", "is not a folder"),
        ("{folder}/run", "is --model_dir itself"),
        ("{folder}/yet/to/come", None),
    ],
)
def test_the_folder_of_the_pretraining_is_one_of_its_own(given: str, told: str | None, tmp_path: Path) -> None:
    for name in ("file", "ckpt-10.index"):
        (tmp_path / name).write_text("")
    config = ExperimentConfig(task=TaskConfig(init_checkpoint=given.format(folder=tmp_path)))
    mistakes = pretraining_mistakes(config, str(tmp_path / "run"))
    assert [told in str(mistake) and str(mistake).startswith("task.init_checkpoint: ") for mistake in mistakes] == (
        [] if told is None else [True]
    )
