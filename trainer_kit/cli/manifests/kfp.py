"""Renders a Kubeflow pipeline as a Python program for KFP's compiler: train, then evaluate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from string import Template

from trainer_kit.cli.manifests.job import FINAL, Job

# KFP retries after every exit code. So an attempt that must not be repeated leaves its code in a file on the volume,
# and later attempts of the same pipeline run end with it at once. A new pipeline run tries again.
_RUN_ONCE = Template("""\
last="$mount/.pipeline-exit-codes/$$1"
shift
if [ -f "$$last" ]; then read -r code < "$$last"; exit "$$code"; fi
"$$@" &
child=$$!
stopped=""
trap 'stopped=yes; kill -TERM "$$child" 2>/dev/null' TERM
while
  wait "$$child"
  code=$$?
  [ -n "$$stopped" ] && [ "$$code" = 143 ]
do
  stopped=""
done
case "$$code" in
  $final) mkdir -p "$mount/.pipeline-exit-codes" && echo "$$code" > "$$last" ;;
esac
exit "$$code"
""")
_PROGRAM = Template('''\
"""A Kubeflow pipeline with a training run. Made by `trainer-kit render kfp`.

    pip install kfp kfp-kubernetes
    python FILE pipeline.yaml

Kubeflow starts a failed task again, at most $retries times. The run then goes on from its newest checkpoint on the
volume claim $volume. After the exit codes $final further attempts end at once, with the same code.
The exit handler shows the state of the run, however the pipeline has ended.
"""

import sys

from kfp import compiler, dsl, kubernetes

IMAGE = $image
RUN_ONCE = """\\
$run_once"""


@dsl.container_component
def train(attempt: str) -> dsl.ContainerSpec:
    """Trains up to the last step."""
    return dsl.ContainerSpec(
        image=IMAGE,
        command=["sh", "-c", RUN_ONCE, "train"],
        args=$command,
    )

$components
@dsl.container_component
def show_run() -> dsl.ContainerSpec:
    """Prints the evaluations of the run."""
    return dsl.ContainerSpec(image=IMAGE, command=["trainer-kit", "evals", $run_dir])


def prepare(task: dsl.PipelineTask, gpus: int) -> None:
    """Sets the resources, the volume and the retries of a task."""
    task.set_cpu_request("$cpus").set_memory_request("${memory}Gi").set_memory_limit("${memory}Gi")
    if gpus:
        task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(gpus)
    task.set_retry(num_retries=$retries, backoff_duration="10s", backoff_factor=2.0, backoff_max_duration="600s")
    task.set_caching_options(enable_caching=False)  # the results are on the volume, not in the pipeline's store
    kubernetes.mount_pvc(task, pvc_name=$volume, mount_path=$mount)


@dsl.pipeline(name="$name")
def pipeline() -> None:
    """Trains, then evaluates."""
    shown = show_run()
    prepare(shown, gpus=0)
    with dsl.ExitHandler(exit_task=shown):
        trained = train(attempt=f"{dsl.PIPELINE_JOB_ID_PLACEHOLDER}-train")
        prepare(trained, gpus=$gpus)
$tasks

if __name__ == "__main__":
    compiler.Compiler().compile(pipeline, sys.argv[1] if len(sys.argv) > 1 else "pipeline.yaml")
''')
_COMPONENT = Template('''
@dsl.container_component
def $function(attempt: str) -> dsl.ContainerSpec:
    """$sentence"""
    return dsl.ContainerSpec(
        image=IMAGE,
        command=["sh", "-c", RUN_ONCE, "$function"],
        args=$command,
    )

''')
_TASK = Template("""\
        $task = $function(attempt=f"{dsl.PIPELINE_JOB_ID_PLACEHOLDER}-$function")$after
        prepare($task, gpus=0)
""")


def render(job: Job) -> str:
    """Returns the Python program that compiles the pipeline."""
    components, tasks = [], []
    if job.evaluate is not None:
        components.append(_component("evaluate", "Evaluates the trained weights.", job.evaluate))
        tasks.append(_TASK.substitute(task="evaluated", function="evaluate", after=".after(trained)"))
    for number, (sidecar, command) in enumerate(job.sidecars.items(), start=1):
        function = f"sidecar_{number}"
        components.append(_component(function, f"Evaluates checkpoints during the training, as {sidecar}.", command))
        tasks.append(_TASK.substitute(task=f"watching_{number}", function=function, after=""))
    final = " | ".join(map(str, FINAL))
    return _PROGRAM.substitute(
        name=job.name,
        image=json.dumps(job.image),
        run_once=_RUN_ONCE.substitute(mount=job.mount, final=final),
        command=_listed(job.command),
        run_dir=json.dumps(job.run_dir),
        components="".join(components),
        tasks="".join(tasks),
        final=", ".join(map(str, FINAL)),
        retries=job.retries,
        volume=json.dumps(job.volume),
        mount=json.dumps(job.mount),
        cpus=job.cpus,
        memory=job.memory,
        gpus=job.gpus,
    )


def _component(function: str, sentence: str, command: Sequence[str]) -> str:
    return _COMPONENT.substitute(function=function, sentence=sentence, command=_listed(command))


def _listed(command: Sequence[str]) -> str:
    """Returns the arguments of RUN_ONCE, with a command, as a Python list; one part on each line."""
    parts = ["attempt", *(json.dumps(part) for part in command)]
    return "".join(["[", *(f"\n            {part}," for part in parts), "\n        ]"])
