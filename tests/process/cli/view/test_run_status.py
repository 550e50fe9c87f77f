"""What the files of a run tell a viewer, whatever state they are in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.process.cli.written_runs import write_params
from trainer_kit.cli.view.run_status import (
    read_best_options,
    require_run,
)
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.run_summary import read_run
from trainer_kit.process.run_lock import RunLock

_DEFAULTS = TrainerConfig()


def test_a_run_that_has_only_begun_is_read_as_far_as_it_is_there(tmp_path: Path) -> None:
    with RunLock(tmp_path, lambda: ("start", 0)):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        folder = require_run(str(tmp_path))
        assert read_run(folder).state == "starting"
        assert read_best_options(folder) == _DEFAULTS
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "trainer: [1, 2]",
        "trainer: {train_steps: many, best_checkpoint_metric_comp: better}",
        "a: [",
        "- 1",
        "\xff",
    ],
)
def test_params_that_are_damaged_or_missing_tell_the_defaults(tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "params.yaml").write_bytes(text.encode("latin-1"))
    assert read_best_options(tmp_path) == _DEFAULTS


def test_params_tell_what_is_best(tmp_path: Path) -> None:
    best = {
        "best_checkpoint_eval_metric": "far|loss",
        "best_checkpoint_metric_comp": "lower",
        "best_checkpoint_export_subdir": "kept",
    }
    write_params(tmp_path, **best)
    assert read_best_options(tmp_path) == TrainerConfig(**best)


def test_a_wrong_setting_leaves_the_others(tmp_path: Path) -> None:
    entries = {"two": {"metric": "loss", "unknown": 1}}
    write_params(tmp_path, best_checkpoint_eval_metric="accuracy", best_checkpoints=entries)
    expected = TrainerConfig(best_checkpoint_eval_metric="accuracy")
    assert read_best_options(tmp_path) == expected


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs", "runs holds no run; `trainer-kit runs {here}/runs` shows the runs in it$"),
        ("runs/digist", r"there is no folder .*digist; did you mean {here}/runs/digits\?$"),
        ("runs/digits/params.yaml", "params.yaml is a file; give a folder"),
        ("far/away/run", "there is no folder .*; there is no folder {here}/far/away either$"),
    ],
)
def test_another_folder_is_refused_with_what_is_there(
    path: str, message: str, tmp_path: Path
) -> None:
    write_params(tmp_path / "runs" / "digits")
    with pytest.raises(UsageError, match=message.format(here=tmp_path)):
        require_run(str(tmp_path / path))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0)
    try:
        with pytest.raises(StorageError, match="cannot be read: Permission denied"):
            require_run(str(tmp_path))
    finally:
        tmp_path.chmod(0o700)
