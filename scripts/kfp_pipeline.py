"""Runs a Kubeflow pipeline of two components, train and then evaluate, on this machine, with a preemption in it.

    .venv/bin/python -m scripts.kfp_pipeline [--environment=FOLDER] [--steps=N]

KFP is installed into an environment of its own, by default in a temporary folder. Three runs of the pipeline of
scripts/kfp_local_pipeline.py train the experiment digits:

1. the reference, from the first step to the last;
2. one whose training component gets SIGTERM at about half of the steps, so that the pipeline fails;
3. the second one started again: it goes on where that has stopped.

Exit code 0: the first and the last run give the same metrics, bit by bit, and the second one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.manifest_environment import environment
from scripts.source_files import ROOT
from trainer_kit.cli.view.run_status import read_trainer
from trainer_kit.telemetry.metrics_jsonl import newest_report


def main() -> int:
    """Runs the pipelines and compares them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="", metavar="FOLDER", help="The environment of KFP, kept.")
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="The number of steps. Default: 600.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        python = environment(Path(arguments.environment or f"{temporary}/environment").absolute())
        flags = ["--experiment=digits", f"--params_override=trainer.train_steps={arguments.steps}"]
        runs = Path(temporary, "runs")
        reference = _run(python, runs / "reference", flags)
        stopped = _run(python, runs / "preempted", flags, stop_at=arguments.steps // 2)
        step = _newest_step(runs / "preempted")
        again = _run(python, runs / "preempted", flags)
    print(f"reference: {reference}\npreempted at step {step} of {arguments.steps}: {stopped}\nstarted again: {again}")
    passed = reference is not None and stopped is None and 0 < step < arguments.steps and reference == again
    print("the same metrics, bit by bit" if passed else "the runs differ, or the second one was not preempted")
    return 0 if passed else 1


def _run(python: Path, model_dir: Path, flags: list[str], stop_at: int | None = None) -> dict[str, Any] | None:
    """Runs the pipeline; returns the metrics of its evaluation, or None if it has failed.

    Args:
      python: The Python that has KFP.
      model_dir: The folder of the run.
      flags: The other flags of the training command.
      stop_at: The step at which the training process gets SIGTERM; None: it gets none.
    """
    command = [str(python), str(ROOT / "scripts" / "kfp_local_pipeline.py"), sys.executable, str(model_dir), *flags]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT) as process:
            while stop_at is not None and process.poll() is None:
                report = newest_report(model_dir / "metrics.jsonl", "train")
                trainer = read_trainer(model_dir)
                if report and trainer and trainer.pid and report["step"] >= stop_at:
                    os.kill(trainer.pid, signal.SIGTERM)
                    break
                time.sleep(0.05)
        output.seek(0)
        text = output.read()
    print(text, flush=True)
    found = [line for line in text.splitlines() if line.startswith("metrics: ")]
    return json.loads(found[-1].removeprefix("metrics: ")) if process.returncode == 0 else None


def _newest_step(model_dir: Path) -> int:
    return max((int(path.name.split("-")[1].split(".")[0]) for path in model_dir.glob("ckpt-*.index")), default=0)


if __name__ == "__main__":
    sys.exit(main())
