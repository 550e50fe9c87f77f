"""What all tiny experiments have in common: how long they run, and how they are cut from a
registered config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from official.core import exp_factory

from tests.engine.compat.model_garden.tiny.records import DATA_SEED

STEPS = 50
INTERVAL = 25
STEPS_PER_LOOP = 10


def trainer(steps_per_loop: int = STEPS_PER_LOOP, **more: Any) -> dict[str, Any]:
    """50 steps, two evaluations over all of the validation data, two checkpoints.

    Orbit stops a loop early where an evaluation is due: with loops of 10, the loss is logged at 10,
    20, 25, 35, 45, 50.
    """
    return {
        "train_steps": STEPS,
        "steps_per_loop": steps_per_loop,
        "summary_interval": steps_per_loop,
        "checkpoint_interval": INTERVAL,
        "validation_interval": INTERVAL,
        "validation_steps": -1,
        **more,
    }


def optimizer(kind: str, learning_rate: float, **options: Any) -> dict[str, Any]:
    """An optimizer with a constant learning rate and without a warm-up."""
    return {
        "optimizer": {"type": kind, kind: options},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": learning_rate}},
        "warmup": {"type": None},
    }


def data(folder: Path, part: str, batch_size: int, **more: Any) -> dict[str, Any]:
    """Where the records of a part are, the size of their batches, and the seed of their order."""
    return {
        "input_path": str(folder / f"{part}-*.tfrecord"),
        "global_batch_size": batch_size,
        "is_training": part == "train",
        "shuffle_buffer_size": 32,
        "seed": DATA_SEED,
        **more,
    }


def cut(experiment: str, task: dict[str, Any], trainer: dict[str, Any]) -> Any:
    """A registered experiment with some values replaced: in float32, for any device."""
    config = exp_factory.get_exp_config(experiment)
    runtime = {"distribution_strategy": "off", "mixed_precision_dtype": None, "enable_xla": False}
    config.override({"task": task, "trainer": trainer, "runtime": runtime}, is_strict=True)
    config.validate()
    return config
