"""A pipeline of two components, train and then evaluate, run on this machine by KFP. For scripts.kfp_pipeline.

    ENVIRONMENT/bin/python scripts/kfp_local_pipeline.py PYTHON MODEL_DIR FLAG ...

It runs in the environment of KFP, and the components start PYTHON, which has trainer_kit. KFP's local runner runs
components that are Python functions only; `trainer-kit render kfp` makes components that are containers. Prints the
metrics of the evaluation as JSON; exit code 1 if a component fails. KFP reads the annotations of the components when
the module is imported, so that they cannot be postponed.
"""

import json
import sys
import tempfile

from kfp import compiler, dsl, local


@dsl.component
def train(python: str, model_dir: str, flags: list) -> str:
    """Trains up to the last step, and goes on where an earlier attempt has stopped; returns the folder of the run."""
    import subprocess

    command = [python, "-m", "trainer_kit.train", f"--model_dir={model_dir}", "--mode=train_and_eval", *flags]
    done = subprocess.run(command)
    if done.returncode:
        raise RuntimeError(f"trainer_kit ends with exit code {done.returncode}")
    return model_dir


@dsl.component
def evaluate(python: str, model_dir: str, flags: list, metrics: dsl.Output[dsl.Metrics]) -> str:
    """Evaluates the last checkpoint; returns its metrics as JSON."""
    import json
    import subprocess

    command = [python, "-m", "trainer_kit.train", f"--model_dir={model_dir}", "--mode=eval", *flags]
    subprocess.run(command, check=True)
    shown = subprocess.run(
        [python, "-m", "trainer_kit.cli.main", "evals", model_dir, "--json"], check=True, stdout=subprocess.PIPE
    )
    found = json.loads(shown.stdout)[-1]["evaluations"][-1]
    for name, value in found["metrics"].items():
        metrics.log_metric(name, value)
    return json.dumps(found["metrics"])


@dsl.pipeline(name="train-and-evaluate")
def pipeline(python: str, model_dir: str, flags: list) -> str:
    """Trains, then evaluates."""
    trained = train(python=python, model_dir=model_dir, flags=flags)
    return evaluate(python=python, model_dir=trained.output, flags=flags).outputs["Output"]


def main() -> int:
    """Compiles and runs the pipeline; returns the exit code."""
    python, model_dir, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        compiler.Compiler().compile(pipeline, f"{folder}/pipeline.yaml")
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=f"{folder}/outputs")
        try:
            done = pipeline(python=python, model_dir=model_dir, flags=flags)
        except RuntimeError as error:
            print(f"the pipeline has failed: {error}")
            return 1
        print(f"metrics: {json.dumps(json.loads(done.output))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
