"""A sweep that is interrupted, and killed at every place, ends with the trials that it would have
had, each once.

Each process that trains imports TensorFlow, which takes most of the time: there are three.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.source_files import ROOT
from tests.builders import read_json, wait_until
from trainer_kit.errors import ExitCode
from trainer_kit.process.run_lock import is_process_alive

optuna = pytest.importorskip("optuna")
# The numbers of the trials by the order of the values.
KINDS = ["unlucky", "good", "good1", "bad"]
# The median is one of five trials at least.
EARLIER_TRIALS = 5
_FILE = f"""
sampler: grid
pruner: median
space:
  task.kind: {{choices: [{", ".join(KINDS)}]}}
"""


@pytest.fixture
def start_sweep(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts the sweep in a folder. What still runs after the test is killed."""
    (tmp_path / "sweep.yaml").write_text(_FILE)
    arguments = ["--sweep_dir=sweep", "--optuna=sweep.yaml"]
    arguments.append("--import_module=tests.process.end_to_end.swept_experiment")
    metric = "best_checkpoint_eval_metric=validation_loss,best_checkpoint_metric_comp=lower"
    arguments.append(f"--params_override={metric}")
    sweeps: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        sweep = subprocess.Popen(
            [sys.executable, "-m", "trainer_kit", "sweep", "swept", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        sweeps.append(sweep)
        return sweep

    yield start
    for sweep in sweeps:
        sweep.kill()
        sweep.communicate()


def _add_earlier_trials(study: Any) -> None:
    """Adds finished trials, so that a trial with a larger loss at step 5 is pruned."""
    distribution = optuna.distributions.CategoricalDistribution(KINDS)
    for _ in range(EARLIER_TRIALS):
        trial = optuna.trial.create_trial(
            value=9.0,
            params={"task.kind": "good"},
            distributions={"task.kind": distribution},
            intermediate_values={5: 9.0},
        )
        study.add_trial(trial)


def test_a_sweep_continues_after_ctrl_c_and_kills(
    tmp_path: Path, start_sweep: Callable[[], subprocess.Popen[str]]
) -> None:
    # Ctrl-C before the first trial has begun.
    sweep = start_sweep()
    assert sweep.stdout is not None
    assert sweep.stdout.readline() == 'trial 0 starts: task.kind="unlucky"\n'
    sweep.send_signal(signal.SIGINT)
    output, _ = sweep.communicate(timeout=60)
    assert (sweep.returncode, output) == (ExitCode.INTERRUPTED, "stopped by SIGINT\n")

    # The sweep is killed in trial 1, which shares a process with trial 0. That ends, too.
    pause = tmp_path / "sweep" / "trial_0001.pause"
    pause.touch()
    sweep = start_sweep()
    wait_until(pause.read_text, 120.0)
    worker = int(pause.read_text())
    sweep.kill()
    wait_until(lambda: not is_process_alive(worker))
    pause.unlink()

    # The process of trial 1 is killed. The sweep goes on with the others.
    study = optuna.load_study(
        study_name="sweep", storage=f"sqlite:///{tmp_path / 'sweep' / 'study.db'}"
    )
    _add_earlier_trials(study)
    sweep = start_sweep()
    assert sweep.stdout is not None
    while (line := sweep.stdout.readline()) != 'trial 1 continues: task.kind="good"\n':
        assert line, "the sweep has ended"
    (child,) = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    output, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == ExitCode.BUG, output
    assert "trial 1 was cut off: its process ended with exit code -9" in output
    assert "trial 3 was pruned at step 5" in output

    # Trial 1 continues.
    sweep = start_sweep()
    output, _ = sweep.communicate(timeout=120)

    assert sweep.returncode == ExitCode.BUG, output
    assert 'trial 1 continues: task.kind="good"' in output
    assert "trial 0 has failed: RuntimeError: no luck" in output
    trials = study.trials[: len(KINDS)]
    assert len(study.trials) == len(KINDS) + EARLIER_TRIALS
    assert [trial.params["task.kind"] for trial in trials] == KINDS
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE", "COMPLETE", "PRUNED"]
    assert trials[0].user_attrs == {"error": "RuntimeError: no luck"}

    # Each run has trained 20 steps, the killed one in two starts.
    runs = [tmp_path / "sweep" / f"trial_{trial.number:04d}" for trial in trials]
    assert not runs[0].exists()
    finals = [read_json(run / "final.json") for run in runs[1:]]
    assert [final["step"] for final in finals] == [20, 20, 5]
    assert finals[-1]["stopped"] == "pruned by the sweep"
    starts = [len(read_json(run / "manifest.json")["starts"]) for run in runs[1:]]
    assert starts == [2, 1, 1]
    assert study.best_value == min(final["best"]["value"] for final in finals)
