"""Programs of Tensorpack as experiments, for the command line, sidecars and the supervisor."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import trainer_kit.compat.tensorpack.models.registry as registry
from trainer_kit.compat.tensorpack.program_config import TRAINER, ProgramConfig
from trainer_kit.compat.tensorpack.program_graph import leave_default_graph
from trainer_kit.compat.tensorpack.program_run import (
    CapturedProgram,
    build_config,
    capture_programs,
)
from trainer_kit.compat.tensorpack.utils import logger
from trainer_kit.config.experiment_registry import register_experiment as register_config
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.errors import UsageError

if TYPE_CHECKING:
    from trainer_kit.compat.tensorpack.train.base import Trainer

__all__ = ["register_experiment"]

AnyProgram = TypeVar("AnyProgram", bound=Callable[[], Any])


def register_experiment(name: str) -> Callable[[AnyProgram], AnyProgram]:
    """Returns a decorator that registers a program as the experiment `tensorpack/<name>`.

    The program is a function without arguments that sets up a training and starts it, for example
    by launch_train_with_config. It is called to read its lengths, and again for each run. The
    logger directory is the model_dir of the run then.

    Args:
      name: The name.

    Raises:
      UsageError: When the name is taken.
    """

    def register(program: AnyProgram) -> AnyProgram:
        @configclass
        class ExperimentTaskConfig(ProgramConfig):
            """The section `task` of this experiment."""

        def make_task(params: TaskConfig, logging_dir: str | None = None) -> Any:
            from trainer_kit.compat.tensorpack.program_task import ProgramTask

            return ProgramTask(params, logging_dir, _set_up(name, program, logging_dir))

        configs: list[ExperimentConfig] = []

        @register_config(f"tensorpack/{name}")
        def experiment() -> ExperimentConfig:
            if not configs:
                with _silence_logger():
                    configs.append(build_config(_set_up(name, program, None)))
            # The towers of a program are its replicas.
            runtime = {"distribution_strategy": "off"}
            return configs[0].replace(task=ExperimentTaskConfig(), runtime=runtime)

        register_task(ExperimentTaskConfig, make_task, trainer=TRAINER)
        return program

    return register


@contextlib.contextmanager
def _silence_logger() -> Iterator[None]:
    """A context without the table of a model, which the run itself logs."""
    tensorpack_logger = logging.getLogger("tensorpack")
    level = tensorpack_logger.level
    tensorpack_logger.setLevel(logging.WARNING)
    # A layer is logged once, and the run has to log it.
    logged_layers = registry._LAYER_LOGGED
    registry._LAYER_LOGGED = set()
    try:
        yield
    finally:
        registry._LAYER_LOGGED = logged_layers
        tensorpack_logger.setLevel(level)


def _set_up(name: str, program: Callable[[], Any], folder: str | None) -> Trainer:
    """Runs a program until its training would begin, and returns its trainer.

    Raises:
      UsageError: When it does not start a training.
    """
    # The module of the program may have entered a graph. The engine runs eagerly.
    leave_default_graph()
    try:
        with tempfile.TemporaryDirectory() as temporary_folder, capture_programs():
            # set_logger_dir would also open log.log, which a sidecar shares with the training.
            logger.LOG_DIR = folder or temporary_folder
            os.makedirs(logger.LOG_DIR, exist_ok=True)
            logger.is_folder_fixed = True
            program()
    except CapturedProgram as captured:
        return captured.trainer
    finally:
        logger.is_folder_fixed = False
        leave_default_graph()
    raise UsageError(
        f"the experiment tensorpack/{name} has not started a training; let its function call"
        " launch_train_with_config, or train of a trainer"
    )
