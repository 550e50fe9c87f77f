"""Two workers as two real processes, which talk over loopback and share a model_dir."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FILE = '''
import keras

import trainer_kit
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment


@trainer_kit.configclass
class NormalizedConfig(TinyConfig):
    pass


@trainer_kit.register_task(NormalizedConfig)
class NormalizedTask(TinyTask):
    def build_model(self):
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((8,)), layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dense(3)]
        )


@trainer_kit.register_experiment("normalized")
def normalized():
    """A tiny task with batch normalization, whose statistics take all workers."""
    config = tiny_experiment(train_steps=40, validation_interval=20, best_checkpoint_eval_metric="accuracy")
    return config.replace(task=NormalizedConfig())
'''


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_both(folder: Path, steps: int) -> list[str]:
    """Runs both workers up to `steps`; returns what each wrote to its log."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    command = [
        sys.executable, "-m", "trainer_kit.train", "--import_module=normalized.py", "--experiment=normalized",
        "--mode=train_and_eval", "--model_dir=run",
    ]  # fmt: skip
    runtime = f"runtime.distribution_strategy=multi_worker_mirrored,runtime.worker_hosts='{hosts}'"
    workers = [
        subprocess.Popen(
            [*command, f"--params_override=trainer.train_steps={steps},{runtime},runtime.task_index={index}"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (0, 1)
    ]
    try:
        texts = [worker.communicate(timeout=200)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], texts
    return texts


def test_two_workers_train_evaluate_and_resume_and_the_chief_alone_writes(tmp_path: Path) -> None:
    (tmp_path / "normalized.py").write_text(_FILE)
    chief, other = run_both(tmp_path, 20)
    assert "replicas in sync: 2" in chief
    assert "train | step 20/20" in chief
    assert "train | step" not in other

    chief, other = run_both(tmp_path, 40)
    for text in (chief, other):
        assert "train_and_eval from step 20" in text
    assert re.findall(r"^validation \| step (\d+)/", chief, re.MULTILINE) == ["40"]
    final = json.loads((tmp_path / "run/final.json").read_text())
    assert final["step"] == 40
    assert final["metrics"]["accuracy"] > 0.5
    info = json.loads((tmp_path / "run/best_ckpt/info.json").read_text())
    assert (tmp_path / f"run/best_ckpt/{info['checkpoint']}.index").exists()
    assert not list(tmp_path.glob("run/*worker*"))
