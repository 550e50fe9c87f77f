"""Checks what `trainer-kit render` writes by the tools of the systems that read it.

    .venv/bin/python -m scripts.check_manifests [RUN|CONFIG ...] [--environment=FOLDER]

Kubernetes: a schema validator, for the oldest release that the manifest is for and for a newer one. Kubeflow: its
compiler. Slurm: `bash -n`. Docker: hadolint. The tools are installed into an environment of their own, by default in a
temporary folder. Prints what each tool says; exit code 1 if one of them refuses a manifest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.manifest_environment import environment
from trainer_kit.cli.main import main as trainer_kit
from trainer_kit.cli.render import TARGETS

RELEASES = ("1.31", "1.37")  # of Kubernetes
_DIGITS = ["digits", "--sidecar=fast", "--gpus=1", "--params_override=trainer.train_steps=400"]
_VALIDATE = """
import sys, kubernetes_validate, yaml
for job in yaml.safe_load_all(open(sys.argv[1])):
    for release in sys.argv[2:]:
        kubernetes_validate.validate(job, release, strict=True)
        print(f"{job['kind']} {job['metadata']['name']} is valid in Kubernetes {release}")
"""


def main() -> int:
    """Renders and checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", metavar="RUN|CONFIG", help="What is rendered. Default: digits with a sidecar."
    )
    parser.add_argument("--environment", default="", metavar="FOLDER", help="The environment of the tools, kept.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        python = environment(Path(arguments.environment or f"{temporary}/environment").absolute())
        given = [[one] for one in arguments.what] or [_DIGITS]
        codes = [_check(target, one, python, Path(temporary)) for one in given for target in TARGETS]
    return int(any(codes))


def _check(target: str, what: list[str], python: Path, folder: Path) -> int:
    """Renders `what` for a target, prints what its tools say, and returns 0 if all accept it."""
    path = folder / {"docker": "Dockerfile", "kfp": "pipeline.py", "slurm": "job.sh"}.get(target, "job.yaml")
    print(f"== trainer-kit render {target} {' '.join(what)}", flush=True)
    if code := trainer_kit(["render", target, *what, f"--output={path}"]):
        return code
    for command in _commands(target, path, python):
        done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        print(f"{done.stdout}{Path(command[0]).name} ends with {done.returncode}", flush=True)
        if done.returncode:
            return done.returncode
    return 0


def _commands(target: str, path: Path, python: Path) -> Iterator[list[str]]:
    if target == "kubernetes":
        yield [str(python), "-c", _VALIDATE, str(path), *RELEASES]
    elif target == "kfp":
        yield [str(python), str(path), "pipeline.yaml"]
        parts = "for one in yaml.safe_load_all(open('pipeline.yaml')): print('compiled:', ', '.join(sorted(one)))"
        yield [str(python), "-c", f"import yaml\n{parts}"]
    elif target == "slurm":
        yield ["bash", "-n", str(path)]
    else:
        yield [str(python.parent / "hadolint"), str(path)]


if __name__ == "__main__":
    sys.exit(main())
