"""A sweep that is interrupted, and killed at every place, ends with the trials that it would have
had, each once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.source_files import ROOT
from tests.builders import read_json, wait_until
from trainer_kit.errors import ExitCode
from trainer_kit.process.run_lock import is_process_alive

optuna = pytest.importorskip("optuna")
# The numbers of the trials by the order of the values.
KINDS = ["good", "unlucky", "good1", "good2", "good3", "good4", "bad"]
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


def _kill_at_pause(process: subprocess.Popen[str] | None, pause: Path) -> None:
    """Kills the process of the trial that waits, or `process`, with which that has to end."""
    wait_until(pause.read_text, 120.0)
    worker = int(pause.read_text())
    os.kill(process.pid if process else worker, signal.SIGKILL)
    wait_until(lambda: not is_process_alive(worker))
    pause.unlink()


def test_a_sweep_continues_after_ctrl_c_and_kills(
    tmp_path: Path, start_sweep: Callable[[], subprocess.Popen[str]]
) -> None:
    # Ctrl-C before the first trial has begun.
    sweep = start_sweep()
    assert sweep.stdout is not None
    assert sweep.stdout.readline() == 'trial 0 starts: task.kind="good"\n'
    sweep.send_signal(signal.SIGINT)
    output, _ = sweep.communicate(timeout=60)
    assert (sweep.returncode, output) == (ExitCode.INTERRUPTED, "stopped by SIGINT\n")

    # The process of trial 0 is killed, and the sweep goes on. In trial 2 the sweep is killed. Its
    # process ends, too.
    pauses = [tmp_path / "sweep" / f"trial_000{number}.pause" for number in (0, 2)]
    for pause in pauses:
        pause.touch()
    sweep = start_sweep()
    _kill_at_pause(None, pauses[0])
    _kill_at_pause(sweep, pauses[1])

    # Both trials continue.
    sweep = start_sweep()
    output, _ = sweep.communicate(timeout=120)

    assert sweep.returncode == ExitCode.BUG, output
    study = optuna.load_study(
        study_name="sweep", storage=f"sqlite:///{tmp_path / 'sweep' / 'study.db'}"
    )
    trials = study.trials
    assert [trial.params["task.kind"] for trial in trials] == KINDS
    states = [trial.state.name for trial in trials]
    assert states == ["COMPLETE", "FAIL", *["COMPLETE"] * 4, "PRUNED"]
    assert trials[1].user_attrs == {"error": "RuntimeError: no luck"}

    # Each run has trained 20 steps, the killed ones in two starts.
    runs = [tmp_path / "sweep" / f"trial_{trial.number:04d}" for trial in trials]
    assert not runs[1].exists()
    finals = [read_json(run / "final.json") for run in runs if run.exists()]
    assert [final["step"] for final in finals] == [20, 20, 20, 20, 20, 5]
    assert finals[-1]["stopped"] == "pruned by the sweep"
    starts = [len(read_json(run / "manifest.json")["starts"]) for run in runs if run.exists()]
    assert starts == [2, 2, 1, 1, 1, 1]
    assert study.best_value == min(final["best"]["value"] for final in finals)
    assert 'trial 0 continues: task.kind="good"' in output
    assert 'trial 2 continues: task.kind="good1"' in output
    assert "trial 6 was pruned at step 5" in output
