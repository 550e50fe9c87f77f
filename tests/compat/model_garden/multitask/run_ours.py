"""Runs a tiny multi-task experiment on our engine, and prints its curves as the last line, in JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import tensorflow as tf
from official.modeling.multitask import multitask

from tests.compat.model_garden.tiny.curves import read_curves
from tests.compat.model_garden.tiny.experiments import tiny
from trainer_kit.compat.model_garden.multitask import run_experiment
from trainer_kit.distribution.seeds import seed_everything


def run_ours(name: str, data: Path, model_dir: Path, seed: int, mode: str, override: dict[str, Any]) -> Any:
    """Trains and evaluates in this process."""
    experiment = tiny(name)
    if not data.exists():
        data.mkdir(parents=True)
        experiment.write(data)
    params = experiment.config(data, 10)
    params.override(override, is_strict=False)
    seed_everything(seed)
    task = multitask.MultiTask.from_config(params.task, logging_dir=str(model_dir))
    return run_experiment(
        distribution_strategy=tf.distribute.get_strategy(),
        task=task,
        model=experiment.model(),
        mode=mode,
        params=params,
        model_dir=str(model_dir),
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--mode", default="train_and_eval")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--override", type=json.loads, default={})
    flags = parser.parse_args()
    run_ours(flags.name, flags.data, flags.model_dir, flags.seed, flags.mode, flags.override)
    print(json.dumps(read_curves(flags.model_dir)))


if __name__ == "__main__":
    main()
