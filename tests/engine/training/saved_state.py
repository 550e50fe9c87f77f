"""What a run saves of a trainer, and how the trainer of the next start gets it back."""

from __future__ import annotations

from pathlib import Path

from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.training.trainer import Trainer


def save_trainer(trainer: Trainer, folder: Path) -> str:
    """Saves the state of a trainer for the first time, as a run does; returns the path."""
    prefix = folder / "ckpt"
    trainer.before_save(f"{prefix}-1")
    path: str = trainer.checkpoint.save(str(prefix))
    return path


def restore_trainer(trainer: Trainer, path: str) -> None:
    """Gives a new trainer the state in a checkpoint, all of it, as a run does that resumes."""
    with trainer.strategy.scope():
        restore(
            trainer.checkpoint,
            path,
            strict=True,
            optional_sections=trainer.state.optional_sections,
        )
        trainer.after_restore(path)
