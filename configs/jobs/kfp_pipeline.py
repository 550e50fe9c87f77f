"""A Kubeflow pipeline: trains, then evaluates the best weights.

    pip install kfp kfp-kubernetes
    python kfp_pipeline.py pipeline.yaml

Change: the constants, and the name of the pipeline. The page docs/guides/pipeline_jobs.md explains
the exit codes.
"""

import sys

from kfp import compiler, dsl, kubernetes

IMAGE = "my-image:latest"
EXPERIMENT = "my-experiment"
MODEL_DIR = "/runs/my-experiment"
VOLUME_CLAIM = "my-volume"  # mounted at /runs
GPUS = 0  # of the training
RETRIES = 4

# Kubeflow starts a failed task again after every exit code. An attempt that another one would
# repeat in vain leaves its code in a file on the volume: after usage or config, diverged, data,
# storage, nothing to wait for, and Ctrl-C. Later attempts of the same pipeline run then end with
# this code at once. A new pipeline run tries again.
#
# The shell hands no signal on. SIGTERM also interrupts wait, with code 143, before the run has
# saved: then wait again.
RUN_ONCE = """\
last="/runs/.pipeline-exit-codes/$1"
shift
if [ -f "$last" ]; then read -r code < "$last"; exit "$code"; fi
"$@" &
child=$!
stopped=""
trap 'stopped=yes; kill -TERM "$child" 2>/dev/null' TERM
while
  wait "$child"
  code=$?
  [ -n "$stopped" ] && [ "$code" = 143 ]
do
  stopped=""
done
case "$code" in
  2 | 3 | 5 | 6 | 8 | 130) mkdir -p "/runs/.pipeline-exit-codes" && echo "$code" > "$last" ;;
esac
exit "$code"
"""


@dsl.container_component
def train(attempt: str) -> dsl.ContainerSpec:
    """Trains up to the last step, from the newest checkpoint on."""
    return dsl.ContainerSpec(
        image=IMAGE,
        command=["sh", "-c", RUN_ONCE, "train"],
        args=[
            attempt,
            "python",
            "-m",
            "trainer_kit.train",
            f"--experiment={EXPERIMENT}",
            "--mode=train_and_eval",
            f"--model_dir={MODEL_DIR}",
        ],
    )


@dsl.container_component
def evaluate(attempt: str) -> dsl.ContainerSpec:
    """Evaluates the best weights; without trainer.best_checkpoint_eval_metric use the latest."""
    return dsl.ContainerSpec(
        image=IMAGE,
        command=["sh", "-c", RUN_ONCE, "evaluate"],
        args=[
            attempt,
            "python",
            "-m",
            "trainer_kit.train",
            f"--experiment={EXPERIMENT}",
            "--mode=eval",
            "--checkpoint=best",
            f"--model_dir={MODEL_DIR}",
        ],
    )


def prepare(task: dsl.PipelineTask, gpus: int) -> None:
    """Sets the resources, the volume and the retries of a task."""
    task.set_cpu_request("2").set_memory_request("4Gi").set_memory_limit("4Gi")
    if gpus:
        task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(gpus)
    task.set_retry(
        num_retries=RETRIES,
        backoff_duration="10s",
        backoff_factor=2.0,
        backoff_max_duration="600s",
    )
    # The results are on the volume, not in the pipeline's store.
    task.set_caching_options(enable_caching=False)
    kubernetes.mount_pvc(task, pvc_name=VOLUME_CLAIM, mount_path="/runs")


@dsl.pipeline(name="my-experiment")
def pipeline() -> None:
    """Trains, then evaluates."""
    trained = train(attempt=f"{dsl.PIPELINE_JOB_ID_PLACEHOLDER}-train")
    prepare(trained, gpus=GPUS)
    evaluated = evaluate(attempt=f"{dsl.PIPELINE_JOB_ID_PLACEHOLDER}-evaluate").after(trained)
    prepare(evaluated, gpus=0)


if __name__ == "__main__":
    compiler.Compiler().compile(pipeline, sys.argv[1] if len(sys.argv) > 1 else "pipeline.yaml")
