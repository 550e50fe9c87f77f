"""Renders a Kubernetes Job, which acts on the exit codes of trainer_kit, and one for each sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from trainer_kit.cli.manifests.job import AGAIN, COUNTED, FINAL, Job

_HEADER = """\
# A training run as a Kubernetes Job, for Kubernetes 1.31 or newer. Made by `trainer-kit render kubernetes`.
#   kubectl apply --filename=FILE
#   kubectl wait --for=condition=complete --timeout=-1s job/{name}
# Exit code {again} (preempted) starts the run again, as often as it takes. {counted} and deaths by signals start it
# again at most {retries} times. {final} end the Job: another pod would end in the same way.
"""
_SIDECARS = """\
# The sidecar has a Job of its own, and a failure of one does not end the other. If pods run on several nodes, the
# claim {volume!r} has to allow ReadWriteMany.
"""


def render(job: Job) -> str:
    """Returns the YAML of the Job of the run and those of its sidecars."""
    jobs = [_job(job, job.name, "trainer", job.command, job.gpus)]
    for sidecar, command in job.sidecars.items():
        jobs.append(_job(job, job.sidecar_name(sidecar), "sidecar", command, 0))
    header = _HEADER.format(
        name=job.name, again=_listed(AGAIN), counted=_listed(COUNTED), final=_listed(FINAL), retries=job.retries
    )
    return header + (_SIDECARS.format(volume=job.volume) if job.sidecars else "") + _dumped(jobs)


def _listed(codes: Sequence[int]) -> str:
    return ", ".join(map(str, codes))


def _dumped(jobs: Sequence[dict[str, Any]]) -> str:
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in jobs)


def _job(job: Job, name: str, container: str, command: Sequence[str], gpus: int) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": job.name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": job.retries,
            "podReplacementPolicy": "Failed",  # no second pod while the first one still saves
            "podFailurePolicy": {"rules": _rules(container)},
            "template": {
                "metadata": {"labels": dict(labels)},
                "spec": {
                    "restartPolicy": "Never",  # podFailurePolicy allows no other
                    "terminationGracePeriodSeconds": job.stop_seconds,
                    "containers": [_container(job, container, command, gpus)],
                    "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": job.volume}}],
                },
            },
        },
    }


def _rules(container: str) -> list[dict[str, Any]]:
    """Returns the rules for pods that have failed; the first one that matches decides."""
    disruption = [{"type": "DisruptionTarget", "status": "True"}]  # drained or lost with its node: not the run's fault
    return [
        _rule("FailJob", container, FINAL),
        _rule("Ignore", container, AGAIN),
        {"action": "Ignore", "onPodConditions": disruption},
        _rule("Count", container, COUNTED),
    ]


def _rule(action: str, container: str, codes: Sequence[int]) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {"containerName": container, "operator": "In", "values": list(codes)},
    }


def _container(job: Job, name: str, command: Sequence[str], gpus: int) -> dict[str, Any]:
    memory = f"{job.memory}Gi"
    limits: dict[str, Any] = {"memory": memory} | ({"nvidia.com/gpu": gpus} if gpus else {})
    return {
        "name": name,
        "image": job.image,
        "command": list(command),
        "resources": {"requests": {"cpu": str(job.cpus), "memory": memory}, "limits": limits},
        "volumeMounts": [{"name": "runs", "mountPath": job.mount}],
    }
