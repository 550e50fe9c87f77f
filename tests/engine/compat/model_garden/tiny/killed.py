"""Kills runs of tiny experiments after their first checkpoint, starts them again, and prints what differs at the end.

Theirs by their train_lib, ours by the command; each start is a process of its own.

python -m tests.engine.compat.model_garden.tiny.killed [NAME ...] [--params_override=runtime.deterministic_ops=true]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from official.core import exp_factory

from tests.engine.compat.model_garden.tiny.experiments import NAMES, tiny
from tests.engine.compat.model_garden.tiny.run_theirs import run_theirs
from tests.engine.compat.model_garden.tiny.trainer import STEPS, STEPS_PER_LOOP
from trainer_kit.testing import compare_runs

DATA = "TINY_DATA"
SINGLE = [name for name in NAMES if not name.startswith("multitask")]


def _register(name: str) -> None:
    @exp_factory.register_config_factory(f"tiny/{name}")
    def config() -> Any:
        return tiny(name).config(Path(os.environ[DATA]), STEPS_PER_LOOP)


for one in SINGLE:
    _register(one)


def start(side: str, name: str, folder: Path, override: str) -> subprocess.Popen[bytes]:
    """Starts a run in `folder`, of theirs or ours."""
    if side == "theirs":
        command = [__spec__.name, name, f"--folder={folder}"]
    else:
        flags = ("--mode=train_and_eval", f"--model_dir={folder}", f"--params_override={override}")
        command = ["trainer_kit.train", f"--import_module={__spec__.name}", f"--experiment=tfm/tiny/{name}", *flags]
    output = (folder.parent / f"{folder.name}.txt").open("ab")
    return subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT)


def run_killed(side: str, name: str, folder: Path, override: str) -> int:
    """Runs to the first checkpoint, kills, starts again up to the end; returns the exit code of the last start."""
    begun = start(side, name, folder, override)
    first = {"theirs": "checkpoint", "ours": "ckpt-*.commit.json"}[side]  # what makes a checkpoint one to go on from
    while not any(folder.glob(first)) and begun.poll() is None:
        time.sleep(0.01)
    begun.kill()
    assert begun.wait() < 0, f"the run had ended before it was killed: see {folder}.txt"
    assert not (folder / f"ckpt-{STEPS}.index").exists(), "the kill came too late"
    return start(side, name, folder, override).wait()


def difference(one: Path, other: Path) -> str:
    """Tells how far apart the variables of the last checkpoints are."""
    readers = [tf.train.load_checkpoint(str(folder / f"ckpt-{STEPS}")) for folder in (one, other)]
    apart: list[float] = []
    for name, dtype in readers[0].get_variable_to_dtype_map().items():
        if dtype.is_floating:
            first, second = (reader.get_tensor(name) for reader in readers)
            apart.append(float(np.max(np.abs(first - second), initial=0.0)))
    return f"{np.count_nonzero(apart)} of {len(apart)} variables differ, by {max(apart):.1e} at most"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line; --folder runs one of theirs there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=SINGLE, metavar="NAME", help=", ".join(SINGLE))
    parser.add_argument("--params_override", default="", help="of our run")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.folder:
        run_theirs(flags.names[0], Path(os.environ[DATA]), flags.folder, 1, STEPS_PER_LOOP)
        return
    for name in flags.names:
        with tempfile.TemporaryDirectory() as base:
            os.environ[DATA] = f"{base}/data"
            Path(base, "data").mkdir()
            tiny(name).write(Path(base, "data"))
            for side in ("theirs", "ours"):
                folders = Path(base, side), Path(base, f"{side}_killed")
                codes = (
                    start(side, name, folders[0], flags.params_override).wait(),
                    run_killed(side, name, folders[1], flags.params_override),
                )
                assert codes == (0, 0), Path(f"{folders[0]}.txt").read_text() + Path(f"{folders[1]}.txt").read_text()
                told = f"; compare_runs: {compare_runs(*map(str, folders))}" if side == "ours" else ""
                print(f"{name}, {side}: {difference(*folders)}{told}", flush=True)


if __name__ == "__main__":
    main()
