"""Renders a batch script for Slurm, which puts the job back into the queue as the exit code says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from string import Template

from trainer_kit.cli.manifests.job import AGAIN, FINAL, Job

_SCRIPT = Template("""\
#!/bin/bash
# A training run as a Slurm job. Made by `trainer-kit render slurm`.
#   sbatch FILE
# Partition, account and time limit are options of sbatch, such as `sbatch --time=24:00:00 FILE`. Slurm sends SIGTERM
# $stop seconds before the time limit: the run saves, and the job goes back into the queue.
#SBATCH --job-name=$name
#SBATCH --output=$name-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=$cpus
#SBATCH --mem=${memory}G
$gpus#SBATCH --requeue
#SBATCH --signal=B:TERM@$stop

retries=$retries  # restarts after crashes; Slurm counts all restarts of a job together

srun --ntasks=1$overlap \\
  $command &
trainer=$$!
$sidecars
stopped=""
trap 'stopped=yes; kill -TERM "$$trainer" 2>/dev/null' TERM
while  # SIGTERM interrupts wait, with code 143, before the trainer has saved
  wait "$$trainer"
  code=$$?
  [ -n "$$stopped" ] && [ "$$code" = 143 ]
do
  stopped=""
done
trap - TERM
$end_sidecars
case "$$code" in
  0 | $final) ;;  # done, or another attempt would end in the same way
  $again) scontrol requeue "$$SLURM_JOB_ID" ;;  # preempted: again, as often as it takes
  *) [ "$${SLURM_RESTART_COUNT:-0}" -ge "$$retries" ] || scontrol requeue "$$SLURM_JOB_ID" ;;
esac
exit "$$code"
""")
_SIDECAR = Template("""\
# The sidecar uses no GPU, which it would share with the trainer.
CUDA_VISIBLE_DEVICES="" srun --ntasks=1 --overlap \\
  $command &
sidecars+=("$$!")
""")
_END_SIDECARS = """\
[ "$code" = 0 ] || kill -TERM "${sidecars[@]}" 2>/dev/null
wait "${sidecars[@]}"  # after a finished run until the last checkpoint is evaluated
"""


def render(job: Job) -> str:
    """Returns the batch script."""
    sidecars = [_SIDECAR.substitute(command=_quoted(command)) for command in job.sidecars.values()]
    return _SCRIPT.substitute(
        name=job.name,
        stop=job.stop_seconds,
        cpus=job.cpus,
        memory=job.memory,
        gpus=f"#SBATCH --gres=gpu:{job.gpus}\n" if job.gpus else "",
        retries=job.retries,
        overlap=" --overlap" if sidecars else "",
        command=_quoted(job.command),
        sidecars="\n" + "".join(["sidecars=()\n", *sidecars]) if sidecars else "",
        end_sidecars=_END_SIDECARS if sidecars else "",
        final=" | ".join(map(str, FINAL)),
        again=" | ".join(map(str, AGAIN)),
    )


def _quoted(command: Sequence[str]) -> str:
    """Returns a command for the shell, one flag on each line."""
    shown = [shlex.quote(part) for part in command]
    flags = next((place for place, part in enumerate(command) if part.startswith("--")), len(command))
    return " \\\n    ".join([" ".join(shown[:flags]), *shown[flags:]])
