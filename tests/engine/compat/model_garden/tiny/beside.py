"""Runs tiny experiments with their train_lib and on our engine, same seed, same data, and prints how they differ.

python -m tests.engine.compat.model_garden.tiny.beside [NAME ...] [--seed 1] [--steps-per-loop 10]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.engine.compat.model_garden.tiny.curves import read_curves
from tests.engine.compat.model_garden.tiny.experiments import NAMES, tiny
from tests.engine.compat.model_garden.tiny.run_theirs import run_theirs, seed_everything
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP

RAGGED = {"bert", "video", "segmentation"}  # a last batch that is not full: ours weighs every example the same
Curves = dict[str, dict[int, dict[str, float]]]


@dataclass(frozen=True)
class Apart:
    """How far apart two runs are: at most, relative to the value if that is above 1.

    Attributes:
      losses: of the training losses and metrics.
      metrics: of the evaluations, without the validation loss.
      validation_loss: of that alone.
      missing: what theirs reports and ours does not.
    """

    losses: float
    metrics: float
    validation_loss: float
    missing: tuple[str, ...]


def run_ours(name: str, data: Path, model_dir: Path, seed: int, steps_per_loop: int) -> dict[str, Any]:
    """Trains and evaluates in this process, as run_theirs does."""
    from trainer_kit.compat import model_garden

    experiment = tiny(name)
    params = experiment.config(data, steps_per_loop)
    start = time.perf_counter()
    seed_everything(seed)
    model_dir.mkdir(parents=True)  # a translation task writes into it before it is run
    strategy, folder = tf.distribute.get_strategy(), str(model_dir)
    if experiment.model:
        from trainer_kit.compat.model_garden import multitask

        task = multitask.MultiTask.from_config(params.task, logging_dir=folder)
        common = {"distribution_strategy": strategy, "mode": "train_and_eval", "model_dir": folder}
        multitask.run_experiment(task=task, model=experiment.model(), params=params, **common)
    else:
        task = model_garden.get_task(params.task, logging_dir=folder)
        model_garden.run_experiment(strategy, task, "train_and_eval", params, folder)
    return {"name": name, "seconds": time.perf_counter() - start, **read_curves(model_dir)}


def apart(theirs: Curves, ours: Curves) -> Apart:
    """Compares what both have written for TensorBoard."""
    found: dict[str, float] = {"losses": 0.0, "metrics": 0.0, "validation_loss": 0.0}
    missing = []
    for part, step, name, value in _values(theirs):
        own = ours[part].get(step, {}).get(name)
        if own is None:
            missing.append(f"{part} {name} at {step}")
            continue
        kind = "losses" if part == "train" else "validation_loss" if name.endswith("validation_loss") else "metrics"
        difference = abs(value - own) / max(1.0, abs(value))
        found[kind] = max(found[kind], 0.0 if value == own or value != value else difference)
    return Apart(**found, missing=tuple(missing))


def _values(curves: Curves) -> Iterator[tuple[str, int, str, float]]:
    for part in ("train", "validation"):
        for step, values in curves[part].items():
            yield from ((part, step, name, value) for name, value in values.items())


def _in_a_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", __spec__.name, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    whole: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    curves = {part: {int(step): values for step, values in whole[part].items()} for part in ("train", "validation")}
    return {**whole, **curves}


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line; --of runs one side of one experiment and prints its curves as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps-per-loop", type=int, default=STEPS_PER_LOOP)
    parser.add_argument("--of", choices=("theirs", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.of:
        run = run_theirs if flags.of == "theirs" else run_ours
        with tempfile.TemporaryDirectory() as folder:
            model_dir = Path(folder) / "model"
            print(json.dumps(run(flags.names[0], flags.data, model_dir, flags.seed, flags.steps_per_loop)))
        return
    print(f"{'experiment':<24}{'losses':>10}{'metrics':>10}{'val. loss':>11}{'theirs s':>10}{'ours s':>8}  missing")
    for name in flags.names:
        with tempfile.TemporaryDirectory() as folder:
            given = (name, f"--seed={flags.seed}", f"--steps-per-loop={flags.steps_per_loop}", f"--data={folder}/data")
            theirs, ours = (_in_a_process(*given, f"--of={side}") for side in ("theirs", "ours"))
        found = apart(theirs, ours)
        figures = f"{found.losses:>10.1e}{found.metrics:>10.1e}{found.validation_loss:>11.1e}"
        seconds = f"{theirs['seconds']:>10.1f}{ours['seconds']:>8.1f}"
        note = "; a last batch is not full" if name in RAGGED else ""
        print(f"{name:<24}{figures}{seconds}  {', '.join(found.missing) or 'nothing'}{note}", flush=True)


if __name__ == "__main__":
    main()
