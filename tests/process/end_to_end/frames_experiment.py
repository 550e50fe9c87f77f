"""An experiment whose training step prints who has called it, when it is traced."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import trainer_kit
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment


@trainer_kit.configclass
class FramesConfig(TinyConfig):
    """The tiny task."""


@trainer_kit.register_task(FramesConfig)
class FramesTask(TinyTask):
    """Prints the frames of trainer_kit, and those that AutoGraph has made, above each trace of the
    training step.
    """

    def train_step(self, *arguments: Any, **named: Any) -> Any:
        """Takes the step."""
        for frame in traceback.extract_stack():
            is_ours = "/trainer_kit/" in frame.filename or "__autograph_generated" in frame.filename
            if is_ours and frame.name != "<module>":
                print("frame", frame.filename.rpartition("/")[2], frame.name, file=sys.stderr)
        return super().train_step(*arguments, **named)


@trainer_kit.register_experiment("frames")
def frames() -> Any:
    """The tiny experiment."""
    return tiny_experiment().replace(task=FramesConfig())
