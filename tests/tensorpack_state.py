"""Lets a process run one program of Tensorpack after the other."""

from __future__ import annotations

import sys


def reset_tensorpack() -> None:
    """Forgets the graph, the tower and the logger directory of a program, if there was one."""
    if "trainer_kit.compat.tensorpack" not in sys.modules:
        return
    from trainer_kit.compat.tensorpack.utils import logger

    from trainer_kit.compat.tensorpack.program_graph import leave_default_graph
    from trainer_kit.compat.tensorpack.tfutils import tower

    leave_default_graph()
    tower._CurrentTowerContext = None
    if logger._FILE_HANDLER is not None:
        logger._logger.removeHandler(logger._FILE_HANDLER)
        logger._FILE_HANDLER.close()
        logger._FILE_HANDLER = None
    logger.LOG_DIR = None
