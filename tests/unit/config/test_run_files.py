"""The table of a run's files: what a path in it matches, and names that it reserves."""

from __future__ import annotations

import pytest

from tests.config_builders import wrong_fields
from tests.run_directory_page import NAMED_BY, PATHS, matches
from trainer_kit.config.run_files import RESERVED_NAMES
from trainer_kit.config.schema.experiment import TrainerConfig


@pytest.mark.parametrize(
    ("row", "path", "is_match"),
    [
        ("ckpt-<step>.pin", "ckpt-5.pin", True),
        ("ckpt-<step>.pin", "ckpt-5xpin", False),
        ("evals/<name>.jsonl", "evals/a/b.jsonl", False),
        ("train/", "train/plugins/profile/a", True),
        ("train/", "training/a", False),
    ],
)
def test_a_path_of_the_table_matches_whole_names(row: str, path: str, is_match: bool) -> None:
    assert matches(row, path) is is_match


def test_the_names_are_those_of_the_table_that_no_field_changes() -> None:
    rows = [path for path in PATHS if path not in NAMED_BY.values()]

    assert set(RESERVED_NAMES) == {
        path.split("/")[0] for path in rows if "<" not in path.split("/")[0]
    }


@pytest.mark.parametrize("name", ["damaged", "errors", "evals", "params.yaml", "best_checkpoints"])
def test_a_name_of_the_run_itself_cannot_name_another_folder(name: str) -> None:
    assert name in RESERVED_NAMES
    assert wrong_fields(TrainerConfig, {"validation_summary_subdir": name}) == [
        "validation_summary_subdir"
    ]


def test_every_field_that_names_a_folder_exists() -> None:
    defaults = {path: getattr(TrainerConfig(), path.removeprefix("trainer.")) for path in NAMED_BY}
    assert {path: f"{folder}/" for path, folder in defaults.items()} == NAMED_BY
