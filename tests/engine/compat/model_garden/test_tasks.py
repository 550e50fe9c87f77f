"""Their tasks, made from configs of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from official.core import task_factory

from tests.engine.compat.model_garden.garden_task import SmallConfig, SmallTask, small_config
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.garden_trainer import create_task


class _Config(SmallConfig):
    pass


@task_factory.register_task_cls(_Config)
class _Writing(SmallTask):
    """Writes into its folder when it is made, as their translation task does."""

    def __init__(self, params: Any, logging_dir: str | None = None, **more: Any) -> None:
        super().__init__(params, logging_dir, **more)
        assert logging_dir is not None
        Path(logging_dir, "note").write_text("created")


def test_a_task_finds_its_folder_and_what_it_writes_stays(tmp_path: Path) -> None:
    config = small_config()
    config.task = _Config()

    task = create_task(convert(config).task, str(tmp_path / "run"))

    assert isinstance(task, _Writing)
    assert (tmp_path / "run" / "note").read_text() == "created"


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_nothing_was_written_to_is_there_as_before(
    exists: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "run"
    if exists:
        folder.mkdir(parents=True)

    create_task(convert(small_config()).task, str(folder))

    assert folder.exists() == exists
    assert (tmp_path / "runs").exists() == exists
