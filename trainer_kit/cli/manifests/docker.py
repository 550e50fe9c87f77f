"""Renders a Dockerfile, whose image runs the job under trainer_kit's own supervisor."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from string import Template

from trainer_kit.cli.manifests.job import Job, codes
from trainer_kit.run.supervisor.restart_rules import Decision

_FILE = Template("""\
# The image of a training run. Made by `trainer-kit render docker`.
#   docker build --tag=$image --file=FILE .
#   docker run --name=$name --stop-timeout=$stop --volume=$volume:$mount$gpus $image
# The folder of the build has requirements.txt, which names trainer_kit, and the files that the command names.
# The supervisor in the container starts the run again after exit code $again (preempted) and, at most $retries times,
# after $counted and deaths by signals. $final end the container, since another attempt would end in
# the same way: so leave `--restart` out. `docker stop` lets the run save; `docker start $name` goes on.
${sidecars}FROM python:$python-slim
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1
WORKDIR /app
COPY requirements.txt ./
RUN pip install --no-cache-dir --requirement=requirements.txt
COPY . .
STOPSIGNAL SIGTERM
ENTRYPOINT $command
""")
_SIDECAR = Template("# Its sidecar: docker run --volume=$volume:$mount --entrypoint=$program $image $arguments\n")
_SUPERVISE = "import sys, trainer_kit; sys.exit(trainer_kit.supervise(sys.argv[3:], max_restarts=int(sys.argv[1]), log_dir=sys.argv[2]))"  # noqa: E501


def render(job: Job) -> str:
    """Returns the Dockerfile."""
    sidecars = [
        _SIDECAR.substitute(
            volume=job.volume, mount=job.mount, image=job.image, program=command[0], arguments=shlex.join(command[1:])
        )
        for command in job.sidecars.values()
    ]
    return _FILE.substitute(
        image=job.image,
        name=job.name,
        stop=job.stop_seconds,
        volume=job.volume,
        mount=job.mount,
        gpus=" --gpus=all" if job.gpus else "",
        again=_listed(Decision.RESTART),
        counted=_listed(Decision.RETRY),
        retries=job.retries,
        final=_listed(Decision.END),
        sidecars="".join(sidecars),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        command=json.dumps(_supervised(job)),
    )


def _listed(decision: Decision) -> str:
    return ", ".join(str(code) for code in codes(decision) if code)


def _supervised(job: Job) -> Sequence[str]:
    if job.evaluate is not None:
        return [*job.command, f"--max_restarts={job.retries}"]
    return ["python", "-c", _SUPERVISE, str(job.retries), job.run_dir, *job.command]
