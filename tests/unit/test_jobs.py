"""configs/jobs/: what the files say, and what they do with each of our exit codes."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_kit.config.modes import MODES
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import ExitCode
from trainer_kit.run.flags import parse_flags
from trainer_kit.run.supervisor import Decision, classify_exit_code

JOBS = Path(__file__).parents[2] / "configs" / "jobs"
SCRIPTS = ["slurm.sbatch", "slurm_sidecar.sbatch"]
STOP_SECONDS = TrainerConfig().preemption_grace_seconds + 20
ACTIONS = {Decision.END: "FailJob", Decision.RESTART: "Ignore", Decision.RETRY: "Count"}

# Of several machines, a model_dir in use is as a rule that of a machine that was given up for lost.
# So it is worth another attempt, which the supervisor of a single machine does not make.
FINAL = [
    code
    for code in sorted(ExitCode)
    if classify_exit_code(code)[1] is Decision.END
    and code not in (ExitCode.DONE, ExitCode.MODEL_DIR_IN_USE)
]
COUNTED = sorted({*ExitCode} - {*FINAL, ExitCode.DONE, ExitCode.PREEMPTED})

# A trainer that says when it runs, and saves when it is asked to stop.
SAVING_TRAINER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("started", flush=True)
time.sleep(60)
"""


def _check_command(command: list[str]) -> None:
    """Checks that trainer_kit takes a command of a job, with the placeholders of the files."""
    assert command[:3] == ["python", "-m", "trainer_kit.train"]
    values = parse_flags(command[2:])
    assert values.mode in MODES
    assert values.experiment == "my-experiment"
    assert values.model_dir.endswith("runs/my-experiment")


@pytest.mark.parametrize("path", sorted(JOBS.iterdir()), ids=lambda path: path.name)
def test_a_file_names_no_registry_and_its_guide(path: Path) -> None:
    text = path.read_text()

    assert "docs/guides/pipeline_jobs.md" in text

    images = re.findall(r"(?:image: |IMAGE = \"|^FROM )([\w./:-]+)", text, re.MULTILINE)
    assert [image for image in images if "/" in image] == []


# ---- Kubernetes


@pytest.fixture(scope="module")
def jobs() -> list[dict[str, Any]]:
    """The Jobs of the run and of its sidecar."""
    return list(yaml.safe_load_all((JOBS / "kubernetes_job.yaml").read_text()))


@pytest.mark.parametrize("number", [0, 1])
def test_kubernetes_has_a_rule_for_each_exit_code(jobs: list[dict[str, Any]], number: int) -> None:
    spec = jobs[number]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    rules = spec["podFailurePolicy"]["rules"]

    actions = {}
    for rule in rules:
        if codes := rule.get("onExitCodes"):
            assert codes["containerName"] == container["name"]
            assert codes["operator"] == "In"
            assert codes["values"] == sorted(codes["values"])
            actions.update(dict.fromkeys(codes["values"], rule["action"]))

    wanted = {
        code: ACTIONS[classify_exit_code(code)[1]] for code in ExitCode if code is not ExitCode.DONE
    }
    wanted[ExitCode.MODEL_DIR_IN_USE] = "Count"

    assert actions == wanted
    # The first that fits counts.
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore", "Count"]
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_the_jobs_are_as_kubernetes_requires_them(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        assert job["apiVersion"] == "batch/v1"
        assert job["kind"] == "Job"
        assert pod["restartPolicy"] == "Never"
        assert job["spec"]["podReplacementPolicy"] == "Failed"
        assert pod["terminationGracePeriodSeconds"] == STOP_SECONDS
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert mount["mountPath"] == "/runs"
        assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]


def test_the_jobs_run_a_trainer_and_its_sidecar(jobs: list[dict[str, Any]]) -> None:
    commands = [job["spec"]["template"]["spec"]["containers"][0]["command"] for job in jobs]
    trainer, sidecar = [parse_flags(command[2:]) for command in commands]

    for command in commands:
        _check_command(command)

    # The Job is the supervisor.
    assert trainer.mode == "train_and_eval"
    assert trainer.max_restarts == 0
    assert sidecar.mode == "continuous_eval"
    assert sidecar.eval_name == "my-sidecar"
    assert trainer.model_dir == sidecar.model_dir == "/runs/my-experiment"


# ---- Slurm


class Cluster:
    """A folder with stand-ins for srun, python and scontrol, which writes what it was told."""

    def __init__(self, folder: Path, trainer: str) -> None:
        self._folder = folder
        self._requests = folder / "requests"
        self._add("srun", 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"')
        self._add("scontrol", f'echo "$@" >> {self._requests}')
        # The sidecar evaluates the last checkpoint after the end of the run.
        sidecar = f"sleep 0.3; touch {folder}/evaluated"
        self._add("python", f'case "$*" in *continuous_eval*) {sidecar} ;; *) {trainer} ;; esac')

    def _add(self, name: str, text: str) -> None:
        (self._folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (self._folder / name).chmod(0o755)

    def start(self, script: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Starts a batch script as a job with this number of restarts behind it."""
        path = f"{self._folder}{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": path, "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(
            ["bash", JOBS / script], env={**os.environ, **variables}, stdout=subprocess.PIPE
        )

    @property
    def was_requeued(self) -> bool:
        """Whether the job was put back into the queue."""
        return self._requests.exists() and self._requests.read_text() == "requeue 17\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_batch_scripts_are_valid_and_their_commands_too(script: str) -> None:
    text = (JOBS / script).read_text()

    subprocess.run(["bash", "-n", JOBS / script], check=True)

    assert f"#SBATCH --signal=B:TERM@{STOP_SECONDS:g}" in text

    commands = re.findall(r"python -m trainer_kit\.train(?: |--\S+|\\\n)+", text)
    assert len(commands) == SCRIPTS.index(script) + 1

    for command in commands:
        _check_command(command.replace("\\\n", " ").split())


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("codes", "restarts", "again"),
    [
        ([ExitCode.DONE, *FINAL], 0, False),
        ([ExitCode.PREEMPTED], 99, True),
        ([*COUNTED, 137], 3, True),
        (COUNTED, 4, False),
    ],
)
def test_slurm_requeues_as_the_code_says(
    script: str, codes: list[int], restarts: int, again: bool, tmp_path: Path
) -> None:
    for code in codes:
        folder = tmp_path / str(int(code))
        folder.mkdir()
        cluster = Cluster(folder, f"exit {int(code)}")
        assert cluster.start(script, restarts).wait(20) == code
        assert cluster.was_requeued == again


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_lets_a_run_save_before_its_time_ends(script: str, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(SAVING_TRAINER)
    cluster = Cluster(tmp_path, f"exec {sys.executable} {tmp_path}/trainer.py")

    with cluster.start(script) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == ExitCode.PREEMPTED

    assert cluster.was_requeued


def test_slurm_waits_for_the_sidecar_of_a_finished_run(tmp_path: Path) -> None:
    assert Cluster(tmp_path, "exit 0").start("slurm_sidecar.sbatch").wait(20) == 0
    assert (tmp_path / "evaluated").exists()


# ---- Docker


def test_the_image_starts_the_supervisor_of_exit_codes() -> None:
    text = (JOBS / "Dockerfile").read_text().replace("\\\n", "")
    command = json.loads(text.partition("\nENTRYPOINT ")[2])

    _check_command(command)

    assert parse_flags(command[2:]).max_restarts == 4
    assert f"--stop-timeout={STOP_SECONDS:g}" in text


# ---- Kubeflow


def _run_once(folder: Path) -> str:
    """Returns the script around each command of the pipeline, with `folder` as its volume."""
    program = ast.parse((JOBS / "kfp_pipeline.py").read_text())
    assignments = [node for node in program.body if isinstance(node, ast.Assign)]
    values = {ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in assignments}
    script: str = values["RUN_ONCE"]
    return script.replace("/runs/", f"{folder}/")


def test_the_pipeline_is_a_program_that_trains_and_evaluates() -> None:
    text = (JOBS / "kfp_pipeline.py").read_text()

    compile(text, "kfp_pipeline.py", "exec")

    assert "--mode=train_and_eval" in text
    assert "--checkpoint=best" in text
    assert ".after(trained)" in text


def test_kubeflow_repeats_no_attempt_in_vain(tmp_path: Path) -> None:
    script = _run_once(tmp_path)
    starts = {}

    for code in sorted(ExitCode):
        log = tmp_path / f"starts-{int(code)}"
        command = ["sh", "-c", f"echo started >> {log}; exit {int(code)}"]
        for _ in range(2):
            done = subprocess.run(["sh", "-c", script, "train", f"pipeline-{int(code)}", *command])
            assert done.returncode == code
        starts[code] = len(log.read_text().split())

    assert starts == {code: 1 if code in FINAL else 2 for code in ExitCode}


def test_kubeflow_hands_sigterm_on(tmp_path: Path) -> None:
    command = [
        "sh",
        "-c",
        _run_once(tmp_path),
        "train",
        "pipeline-1",
        sys.executable,
        "-c",
        SAVING_TRAINER,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == ExitCode.PREEMPTED
