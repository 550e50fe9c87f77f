"""run_experiment with the signature of official.core.train_lib, on our engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit import runner
from trainer_kit.compat.model_garden.config import convert
from trainer_kit.controller import Controller


def run_experiment(
    distribution_strategy: tf.distribute.Strategy,
    task: Any,
    mode: str,
    params: Any,
    model_dir: str,
    run_post_eval: bool = False,
    save_summary: bool = True,
    train_actions: list[orbit.Action] | None = None,
    eval_actions: list[orbit.Action] | None = None,
    trainer: Any = None,
    controller_cls: type[orbit.Controller] = orbit.Controller,
    summary_manager: Any = None,
    eval_summary_manager: Any = None,
    enable_async_checkpointing: bool = False,
    **options: Any,
) -> tuple[Any, Mapping[str, Any]]:
    """Runs an experiment of theirs in one mode; see trainer_kit.run_experiment, whose further options it takes."""
    return runner.run_experiment(
        distribution_strategy,
        task,
        mode,
        convert(params),
        model_dir,
        run_post_eval,
        save_summary,
        train_actions,
        eval_actions,
        trainer,
        Controller if controller_cls is orbit.Controller else controller_cls,
        summary_manager,
        eval_summary_manager,
        enable_async_checkpointing,
        **options,
    )
