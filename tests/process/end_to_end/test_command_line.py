"""The real commands, in real processes, on an experiment in a file outside the repository."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import final_record, json_lines, read_json, wait_until
from tests.fork_server import Child, ForkServer
from tests.process.end_to_end.scripts_in_a_fork import run_without_trainer_kit

ROOT = Path(__file__).parents[3]

_FILE = '''
import keras
import trainer_kit
from trainer_kit.testing import tiny_experiment
from trainer_kit.testing.tiny_task import CLASSES, FEATURES, TinyConfig, TinyTask


@trainer_kit.configclass
class WithCritic(TinyConfig):
    """Of the task below."""


@trainer_kit.register_task(WithCritic)
class CriticTask(TinyTask):
    """What it evaluates depends on a second model, which its training step changes."""

    def build_model(self):
        self.critic = keras.layers.Dense(CLASSES, kernel_initializer="zeros")
        self.critic.build([None, FEATURES])
        return super().build_model()

    def train_step(self, *args, **kwargs):
        self.critic.kernel.assign_add([[0.001, 0.0, 0.0]] * FEATURES)
        return super().train_step(*args, **kwargs)

    def validation_step(self, inputs, model, metrics=None):
        outputs = model(inputs[0]) + self.critic(inputs[0])
        self.process_metrics(metrics, inputs[1], outputs)
        return {self.loss: self.build_losses(inputs[1], outputs)}


@trainer_kit.register_experiment("outside/tiny")
def tiny(steps: int = 200):
    """A tiny task."""
    config = tiny_experiment(
        train_steps=steps, steps_per_loop=20, summary_interval=20, checkpoint_interval=40,
        validation_interval=50, best_checkpoint_eval_metric="accuracy",
    )
    return trainer_kit.ExperimentConfig(task=WithCritic(), trainer=config.trainer)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the experiment's file in it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "my_experiment.py").write_text(_FILE)
    return folder


def _command(mode: str, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "trainer_kit.train",
        "--import_module=my_experiment.py",
        "--experiment=outside/tiny",
        f"--mode={mode}",
        *arguments,
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


def _start_in_fork(server: ForkServer, folder: Path, mode: str, *arguments: str) -> Child:
    """Starts the command in a process that begins with TensorFlow imported."""
    return server.start("train", *_command(mode, *arguments)[3:], folder=str(folder))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


def _printed_steps(text: str, kind: str) -> list[int]:
    return [int(step) for step in re.findall(rf"^{kind} \| step (\d+)/", text, re.MULTILINE)]


def test_a_run_is_trained_resumed_and_evaluated(folder: Path, server: ForkServer) -> None:
    (folder / "binding.gin").write_text("outside.tiny.steps = 120\nSGDConfig.momentum = 0.8\n")
    common = ("--model_dir=run", "--gin_file=binding.gin")

    first = subprocess.run(
        _command("train_and_eval", *common),
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert first.returncode == 0, first.stderr
    assert _printed_steps(first.stdout, "train")[-1] == 120
    assert _printed_steps(first.stdout, "validation") == [50, 100, 120]
    # A pipe gets lines and no control characters.
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", first.stdout)
    assert "momentum: 0.8" in (folder / "run/params.yaml").read_text()
    assert (folder / "run/operative_config.train_and_eval.gin").is_file()

    longer = "--params_override=trainer.train_steps=200"
    sidecar = _start_in_fork(server, folder, "continuous_eval", *common, longer)
    second = _start_in_fork(server, folder, "train_and_eval", *common, longer).wait()
    assert second.code == 0, second.text
    assert "train_and_eval from step 120" in second.text
    assert _printed_steps(second.text, "train") == [140, 150, 170, 190, 200]

    sidecar_end = sidecar.wait(240)
    assert sidecar_end.code == 0, sidecar_end.text
    sidecar_records = json_lines(folder / "run/evals/continuous_eval.jsonl")
    records = json_lines(folder / "run/evals/validation.jsonl")
    # By the second model as it was trained.
    assert sidecar_records[-1]["metrics"] == records[-1]["metrics"]
    steps = [record["step"] for record in sidecar_records]
    assert steps[-1] == 200
    assert steps == sorted(set(steps))

    evaluation = _start_in_fork(server, folder, "eval", *common, "--checkpoint=best").wait()
    assert evaluation.code == 0, evaluation.text
    line = re.search(r"^validation .*\| accuracy ([\d.]+)", evaluation.text, re.MULTILINE)
    assert line is not None
    # As many digits as are printed.
    best = read_json(folder / "run/best_ckpt/info.json")
    assert float(line.group(1)) == pytest.approx(best["value"], abs=1e-4)


@pytest.mark.parametrize("fuse_steps", [1, 5])
def test_deterministic_ops_train_without_timing_the_input(
    folder: Path, server: ForkServer, fuse_steps: int
) -> None:
    trainer = f"trainer.train_steps=40,trainer.fuse_steps={fuse_steps}"
    overrides = f"--params_override=runtime.deterministic_ops=true,{trainer}"
    run = f"deterministic{fuse_steps}"

    end = _start_in_fork(server, folder, "train", f"--model_dir={run}", overrides).wait()

    assert end.code == 0, end.text
    assert "input" not in final_record(folder / run)["time"]


def test_sigterm_during_the_import_of_tensorflow_is_exit_75(folder: Path) -> None:
    process = subprocess.Popen(
        _command("train", "--model_dir=early"),
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: "tensorflow" in Path(f"/proc/{process.pid}/maps").read_text(), 60)

    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 75, errors
    assert "stopped by SIGTERM" in errors
    assert "Traceback" not in errors


_EVALUATION = """
import numpy as np

points = np.random.default_rng(2).normal(size=(2000, 2)).astype("float32")
right = (model(points).numpy()[:, 0] > 0.0) == (np.linalg.norm(points, axis=1) > 1.2)
print("accuracy", right.mean())
"""


def _example(page: str, name: str) -> str:
    """Returns the code block of a page below the marker of `name`."""
    return page.split(f"<!-- example: {name} -->")[1].split("```python\n")[1].split("```")[0]


def test_the_example_of_the_tutorial_trains(tmp_path: Path, server: ForkServer) -> None:
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    example = _example(tutorial, "my_task.py")
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len([line for line in example.splitlines() if line.strip()]) <= 30

    (tmp_path / "my_task.py").write_text(example)
    lines = tutorial.splitlines()
    command = next(line for line in lines if line.startswith("python -m trainer_kit.train "))
    end = server.run("train", *command.split()[3:], folder=str(tmp_path))
    assert end.code == 0, end.text
    best = read_json(tmp_path / "runs/rings/best_ckpt/info.json")
    assert best["value"] > 0.95

    evaluation = (ROOT / "docs" / "guides" / "evaluation.md").read_text()
    (tmp_path / "plain.py").write_text(_example(evaluation, "plain.py"))
    (tmp_path / "load.py").write_text(_example(tutorial, "load.py") + _EVALUATION)
    done = server.run(run_without_trainer_kit, "plain.py", "load.py", folder=str(tmp_path))
    assert done.code == 0, done.text
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.text)]
    assert accuracies == pytest.approx([best["value"]] * 2)
