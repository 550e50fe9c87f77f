"""Their tasks, made from configs of ours.

What gin files may bind is imported with them, under their names and ours: bindings are read before anything is made.
"""

from __future__ import annotations

import os
from typing import Any

import official.core.train_lib  # noqa: F401
from official.core import task_factory

import trainer_kit.compat.model_garden.trainer  # noqa: F401
from trainer_kit.compat.model_garden.mirror import original
from trainer_kit.compat.model_garden.refusals import told
from trainer_kit.config.base import Config
from trainer_kit.files import is_remote


def create_task(config: Config, logging_dir: str | None = None) -> Any:
    """Returns their task for a task's section that `config.convert` has made; in strategy scope.

    `logging_dir` is there before: some tasks write into it when they are made.

    Raises:
      UsageError, DataError: when it cannot be made of what the section says.
    """
    make_folder(logging_dir)
    section = original(config)
    with told("task", section):
        return task_factory.get_task(section, logging_dir=logging_dir)


def make_folder(logging_dir: str | None) -> None:
    """Makes a local folder if there is none."""
    if logging_dir and not is_remote(logging_dir):
        os.makedirs(logging_dir, exist_ok=True)
