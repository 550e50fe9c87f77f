"""Creates Model Garden tasks from trainer_kit configs.

The functions that gin files may bind are imported with this module, because bindings are read before anything is built.
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
    """Returns the Model Garden task for a task's section that `convert` has created; called in strategy scope.

    `logging_dir` exists during the call, because some tasks write to it when they are created.

    Raises:
      UsageError, DataError: when the task cannot be created from the section.
    """
    section = original(config)
    with folder(logging_dir), told("task", section):
        return task_factory.get_task(section, logging_dir=logging_dir)


@contextlib.contextmanager
def folder(logging_dir: str | None) -> Iterator[None]:
    """A context in which a local folder exists; afterwards it is removed if it was created here and is empty."""
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
