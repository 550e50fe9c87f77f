"""The table of a run's files: what a path in it matches, and that users' folders cannot have these names."""

from __future__ import annotations

import pytest

from trainer_kit.config.run_files import RUN_FILES, RUN_NAMES, RunFile
from trainer_kit.config.schema.experiment import TrainerConfig


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("ckpt-<step>.pin", "ckpt-5.pin", True),
        ("ckpt-<step>.pin", "ckpt-5xpin", False),
        ("evals/<name>.jsonl", "evals/a/b.jsonl", False),
        ("train/", "train/plugins/profile/a", True),
        ("train/", "training/a", False),
    ],
)
def test_a_path_of_the_table_matches_whole_names(pattern: str, path: str, matches: bool) -> None:
    assert RunFile(pattern, "", "", "").matches(path) is matches


@pytest.mark.parametrize("name", ["foreign", "errors", "evals", "params.yaml", "best_checkpoints"])
def test_a_name_of_the_run_itself_cannot_name_another_folder(name: str) -> None:
    assert name in RUN_NAMES
    with pytest.raises(ValueError, match=f"'{name}' is a name that trainer_kit uses itself"):
        TrainerConfig(validation_summary_subdir=name)


def test_every_field_that_names_a_folder_exists() -> None:
    named = {one.named_by: one.path for one in RUN_FILES if one.named_by}
    defaults = {path: getattr(TrainerConfig(), path.removeprefix("trainer.")) for path in named}
    assert {path: f"{folder}/" for path, folder in defaults.items()} == named
