"""Job: the description of a training run from which the manifests of all systems are rendered."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_kit import files
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.run.supervisor.restart_rules import OUTCOMES, Decision

_LONGEST_NAME = 52  # characters; Kubernetes adds up to eleven to the name of a Job for its pods
_AFTER_GRACE = 20  # seconds from the end of the trainer's own grace time to SIGKILL


def codes(decision: Decision) -> tuple[int, ...]:
    """Returns the exit codes after which our own supervisor decides so, in ascending order."""
    return tuple(sorted(int(code) for code, (_, one) in OUTCOMES.items() if one is decision))


# Of several machines, a model_dir in use is as a rule that of a machine that was given up for lost, and whose trainer
# lives on for a while. So that is worth another attempt, which the supervisor of a single machine does not make.
_IN_USE = ExitCode.MODEL_DIR_IN_USE
FINAL = tuple(code for code in codes(Decision.END) if code not in (ExitCode.DONE, _IN_USE))
AGAIN = codes(Decision.RESTART)
COUNTED = tuple(sorted((*codes(Decision.RETRY), int(_IN_USE))))


@dataclass(frozen=True)
class Job:
    """A training run and what it needs.

    Attributes:
      name: The name of the job, a DNS label.
      command: The training command, which has no supervisor of its own.
      model_dir: The folder of the job, as the command names it.
      run_dir: The folder of the run's records, which is in model_dir or model_dir itself.
      sidecars: The commands of the run's continuous_eval sidecars, by name.
      evaluate: The command that evaluates the trained weights; None: the command of the run is a program of its own.
      grace_seconds: trainer.preemption_grace_seconds of the run.
      image: The container image.
      volume: The name of the volume, or of the volume claim, that holds model_dir.
      cpus, memory, gpus: The resources: CPU cores, GiB of memory and GPUs.
      retries: The number of restarts after crashes.
    """

    name: str
    command: tuple[str, ...]
    model_dir: str
    run_dir: str
    sidecars: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evaluate: tuple[str, ...] | None = None
    grace_seconds: float = 25
    image: str = ""
    volume: str = "runs"
    cpus: int = 2
    memory: int = 4
    gpus: int = 0
    retries: int = 4

    @property
    def mount(self) -> str:
        """The path at which containers mount the volume: the parent of model_dir."""
        return os.path.dirname(self.model_dir)

    @property
    def stop_seconds(self) -> int:
        """The seconds from SIGTERM to SIGKILL, which are more than the trainer takes to save and end."""
        return math.ceil(self.grace_seconds) + _AFTER_GRACE

    def sidecar_name(self, sidecar: str) -> str:
        """Returns the name of the job of a sidecar."""
        return dns_label(f"{self.name}-{sidecar}")


def dns_label(text: str) -> str:
    """Returns a text as a DNS label: small letters, digits and hyphens."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return label or "run"


def check_name(name: str) -> str:
    """Returns the name of a job.

    Raises:
      UsageError: when it is not a DNS label.
    """
    if name != dns_label(name):
        advice = f"use small letters, digits and hyphens, at most {_LONGEST_NAME}, such as {dns_label(name)}"
        raise UsageError(f"--name: {name!r} cannot be the name of a job; {advice}")
    return name


def check_model_dir(folder: str, in_container: bool) -> str:
    """Returns the folder of a run.

    Args:
      folder: The folder.
      in_container: Whether it is a folder in a volume of a container.

    Raises:
      UsageError: when it is a remote folder, or not in a folder that can be mounted.
    """
    if files.is_remote(folder):
        raise UsageError(f"--model_dir: {folder!r} is a remote folder; mount it, and give the path of the mount")
    folder = os.path.normpath(folder)
    if in_container and not re.fullmatch(r"[\w./-]+", folder):  # scripts in containers name it
        raise UsageError(
            f"--model_dir: {folder!r} has characters other than letters, digits and _ . / -; leave them out"
        )
    if in_container and (not os.path.isabs(folder) or os.path.dirname(folder) == "/"):
        advice = "give a folder in the mounted volume, such as /runs/digits"
        raise UsageError(f"--model_dir: {folder!r} is not an absolute path in a folder that can be mounted; {advice}")
    return folder
