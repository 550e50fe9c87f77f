"""The manager of a run's checkpoints, as the config has it."""

from __future__ import annotations

from pathlib import Path

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.training.trainer_creation import create_trainer


def test_the_config_sets_the_save_interval_and_max_to_keep(tmp_path: Path) -> None:
    config = linear_experiment(max_to_keep=2, checkpoint_interval=3)
    trainer = create_trainer(config, LinearTask(config.task))
    run = RunDirectory(str(tmp_path), config.trainer)
    manager = CheckpointManager(trainer, run, config.trainer, asynchronous=False)

    for step in range(1, 11):
        trainer.global_step.assign(step)
        manager.save(step)

    kept = sorted(int(path.stem.split("-")[1]) for path in tmp_path.glob("ckpt-*.index"))

    assert kept == [6, 9]
    assert manager.checkpoint_interval == 3
