"""Runs a tiny experiment with their own train_lib, and prints its curves as the last line, in JSON.

python -m tests.engine.compat.model_garden.tiny.run_theirs NAME [--seed 1] [--steps-per-loop 10] [--deterministic]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras
from official.core import task_factory, train_lib, train_utils
from official.modeling.multitask import multitask
from official.modeling.multitask import train_lib as multitask_train_lib
from official.vision.utils import summary_manager

from tests.engine.compat.model_garden.tiny.curves import read_curves
from tests.engine.compat.model_garden.tiny.experiments import NAMES, Tiny, tiny
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP


def seed_everything(seed: int) -> None:
    """As trainer_kit seeds: Python, NumPy, TensorFlow, and Keras layers with generators of their own."""
    tf_keras.backend.experimental.enable_tf_random_generator()
    tf_keras.utils.set_random_seed(seed)


def run_theirs(name: str, data: Path, model_dir: Path, seed: int, steps_per_loop: int) -> dict[str, Any]:
    """Trains and evaluates in this process; the curves by step, and the seconds without those of the data."""
    experiment = tiny(name)
    if not data.exists():
        data.mkdir(parents=True)
        experiment.write(data)
    params = experiment.config(data, steps_per_loop)
    start, processor = time.perf_counter(), time.process_time()
    seed_everything(seed)
    _run(experiment, params, str(model_dir))
    seconds = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - processor}
    return {"name": name, **seconds, **read_curves(model_dir)}


def _run(experiment: Tiny, params: Any, model_dir: str) -> None:
    train_utils.serialize_config(params, model_dir)  # makes the folder, which a translation task expects to be there
    common = {"distribution_strategy": tf.distribute.get_strategy(), "mode": "train_and_eval", "model_dir": model_dir}
    if experiment.model:
        task = multitask.MultiTask.from_config(params.task, logging_dir=model_dir)
        multitask_train_lib.run_experiment(task=task, model=experiment.model(), params=params, **common)
        return
    task = task_factory.get_task(params.task, logging_dir=model_dir)
    images = summary_manager.maybe_build_eval_summary_manager(params=params, model_dir=model_dir)
    train_lib.run_experiment(task=task, params=params, eval_summary_manager=images, **common)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps-per-loop", type=int, default=STEPS_PER_LOOP)
    parser.add_argument("--data", type=Path, help="written if it is not there; a temporary folder by default")
    parser.add_argument("--deterministic", action="store_true", help="tf.config.experimental.enable_op_determinism")
    flags = parser.parse_args()
    if flags.deterministic:
        tf.config.experimental.enable_op_determinism()
    with tempfile.TemporaryDirectory() as folder:
        data = flags.data or Path(folder) / "data"
        curves = run_theirs(flags.name, data, Path(folder) / "model", flags.seed, flags.steps_per_loop)
    print(json.dumps(curves))


if __name__ == "__main__":
    main()
