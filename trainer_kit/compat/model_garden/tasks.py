"""Their tasks, made from configs of ours."""

from __future__ import annotations

from typing import Any

from official.core import task_factory

from trainer_kit.compat.model_garden.mirror import original
from trainer_kit.config.base import Config


def create_task(config: Config, logging_dir: str | None = None) -> Any:
    """Returns their task for a task's section that `config.convert` has made; in strategy scope."""
    return task_factory.get_task(original(config), logging_dir=logging_dir)
