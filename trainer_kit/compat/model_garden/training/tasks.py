"""Makes tasks of Model Garden from configs of trainer_kit.

What gin files may bind is imported with this module: bindings are read before anything is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import official.core.train_lib  # noqa: F401
from official.core import task_factory

import trainer_kit.compat.model_garden.training.trainer  # noqa: F401
from trainer_kit.compat.model_garden.config.build_errors import told
from trainer_kit.compat.model_garden.config.config_classes import original
from trainer_kit.config.schema.base import Config
from trainer_kit.files import is_remote


def create_task(config: Config, logging_dir: str | None = None) -> Any:
    """Returns the task of Model Garden for a task's section that `convert` has made; in strategy scope.

    `logging_dir` is there meanwhile: some tasks write into it when they are made.

    Raises:
      UsageError, DataError: when it cannot be made of what the section says.
    """
    section = original(config)
    with folder(logging_dir), told("task", section):
        return task_factory.get_task(section, logging_dir=logging_dir)


@contextlib.contextmanager
def folder(logging_dir: str | None) -> Iterator[None]:
    """Has a local folder be there for what is done inside; where nothing was written to it, it goes again."""
    if not logging_dir or is_remote(logging_dir):
        yield
        return
    path = Path(logging_dir).absolute()
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            for one in missing:
                one.rmdir()
