"""`trainer-kit render`: what each manifest says, and what its scripts do with exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from trainer_kit.cli.main import main
from trainer_kit.cli.manifests import docker, job, job_commands, kubernetes
from trainer_kit.config.modes import MODES
from trainer_kit.run.flags import parse_flags

ROOT = Path(__file__).parents[3]
TARGETS = ("kfp", "kubernetes", "slurm", "docker")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments are looked up from the working directory."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The records of a run with a sidecar, and with flags that a job must not repeat."""
    folder = tmp_path / "Digits_1"
    (folder / "evals").mkdir(parents=True)
    flags = ["--experiment=digits", "--mode=train", f"--model_dir={folder}", "--params_override=trainer.seed=a b"]
    command = ["/here/trainer_kit/train.py", *flags, "--from_step=3", "--max_restarts=2"]
    (folder / "manifest.json").write_text(json.dumps({"command": command}))
    (folder / "params.yaml").write_text("trainer: {preemption_grace_seconds: 60.5}")
    (folder / "evals" / "fast.jsonl").write_text("")
    return folder


def _rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["render", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["render", *arguments]) == 2
    return capsys.readouterr().err


def test_the_job_of_an_experiment_equals_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    made = yaml.safe_load(_rendered(capsys, "kubernetes", "digits"))
    example = yaml.safe_load((ROOT / "configs" / "kubernetes_job.yaml").read_text())
    assert made["spec"]["podFailurePolicy"] == example["spec"]["podFailurePolicy"]
    pod, other = made["spec"]["template"]["spec"], example["spec"]["template"]["spec"]
    assert pod["containers"][0]["volumeMounts"] == other["containers"][0]["volumeMounts"]
    assert pod["volumes"] == other["volumes"]
    assert pod["containers"][0]["command"] == other["containers"][0]["command"][:-1]  # which sets another grace time


def test_a_run_gives_command_sidecars_and_grace_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, sidecar = yaml.safe_load_all(_rendered(capsys, "kubernetes", str(run), "--gpus=2"))
    assert [one["metadata"]["name"] for one in (trainer, sidecar)] == ["digits-1", "digits-1-fast"]
    pods = [one["spec"]["template"]["spec"] for one in (trainer, sidecar)]
    assert {pod["terminationGracePeriodSeconds"] for pod in pods} == {81}
    first, second = [parse_flags(pod["containers"][0]["command"][2:]) for pod in pods]
    assert (first.mode, second.mode, second.eval_name) == ("train", "continuous_eval", "fast")
    for values in (first, second):
        assert values.model_dir == "/runs/digits-1" and values.params_override == ["trainer.seed=a b"]
        assert (values.from_step, values.max_restarts) == (None, 0)
    assert [pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for pod in pods] == [2, None]


def test_paths_that_a_container_loses_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("job", "data"):
        (tmp_path / name).mkdir()
    record, inside, outside = tmp_path / "job" / "manifest.json", f"--job_dir={tmp_path}/job", f"--data={tmp_path}/data"
    for arguments, told in (([inside, outside, "--rate=0.1"], f"{outside}: outside of"), ([], "does not name")):
        record.write_text(json.dumps({"command": ["train.py", *arguments]}))
        caplog.clear()
        _rendered(capsys, "kubernetes", str(tmp_path / "job"))
        (message,) = caplog.messages
        assert told in message


def test_the_run_of_a_program_keeps_its_own_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "job" / "checkpoints"
    folder.mkdir(parents=True)
    command = ["train.py", f"--job_dir={tmp_path}/job", "--rate=0.1", f"--logs={tmp_path}/job/logs"]
    (folder / "manifest.json").write_text(json.dumps({"command": command}))
    assert yaml.safe_load(_rendered(capsys, "kubernetes", str(folder.parent)))["metadata"]["name"] == "job"
    made = yaml.safe_load(_rendered(capsys, "kubernetes", str(folder), "--name=mine"))
    container = made["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == [
        "python",
        "train.py",
        "--job_dir=/runs/mine",
        "--rate=0.1",
        "--logs=/runs/mine/logs",
    ]
    entry = _rendered(capsys, "docker", str(folder), "--name=mine").splitlines()[-1]
    program = json.loads(entry.removeprefix("ENTRYPOINT "))
    compile(program[2], "supervisor", "exec")
    assert program[3:5] == ["4", "/runs/mine/checkpoints"] and program[5:] == container["command"]
    assert "leave --mode" in _refused(capsys, "kfp", str(folder), "--mode=train")


@pytest.mark.parametrize("told", ["job", "job/checkpoints"])
@pytest.mark.parametrize("given", ["job", "job/checkpoints"])
def test_a_program_stays_in_its_folder_with_slurm(
    told: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    command = ["train.py", f"{tmp_path}/{told}"]
    (tmp_path / "job" / "checkpoints" / "manifest.json").write_text(json.dumps({"command": command}))
    assert f"  python train.py {tmp_path}/{told} &\n" in _rendered(capsys, "slurm", f"{tmp_path}/{given}")
    moved = _rendered(capsys, "slurm", f"{tmp_path}/{given}", "--model_dir=/runs/mine")
    below = "/checkpoints" if (given, told) == ("job", "job/checkpoints") else ""
    assert f"  python train.py /runs/mine{below} &\n" in moved


def test_a_config_file_needs_an_experiment(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--config_file=configs/digits.yaml" in _rendered(capsys, "slurm", "configs/digits.yaml")
    other = tmp_path / "other.yaml"
    other.write_text("trainer: {train_steps: 5}")
    assert "--experiment" in _refused(capsys, "slurm", str(other))
    assert f"--config_file={other}" in _rendered(capsys, "slurm", str(other), "--experiment=digits")
    assert "digits.yaml" in _refused(capsys, "slurm", "configs/digit.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kubernetes", "gs://bucket/run"], "remote folder"),
        (["slurm", "digits", "--model_dir=gs://bucket/run"], "remote folder"),
        (["docker", "digits", "--model_dir=runs/digits"], "such as /runs/digits"),
        (["kfp", "digits", "--model_dir=/digits"], "such as /runs/digits"),
        (["kfp", "digits", "--model_dir=/runs/it's mine"], "other than letters"),
        (["kfp", "digits", "--name=My_Run"], "such as my-run"),
        (["kfp", "digts"], "digits"),
        (["kfp", "configs"], "holds no run"),
    ],
)
def test_mistakes_end_with_a_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = _refused(capsys, *arguments)
    assert message in error and "Traceback" not in error


def test_output_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _rendered(capsys, "docker", "digits", f"--output={tmp_path}/Dockerfile") == ""
    assert (tmp_path / "Dockerfile").read_text() == _rendered(capsys, "docker", "digits")


def test_the_image_has_the_supervisor_of_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    entry = _rendered(capsys, "docker", "digits", "--retries=7").splitlines()[-1]
    values = parse_flags(json.loads(entry.removeprefix("ENTRYPOINT "))[2:])
    assert values.max_restarts == 7 and values.mode in MODES and values.model_dir == "/runs/digits"


def test_no_character_of_a_command_is_lost() -> None:
    odd = ("printf", "%s\\n", "--a=it's $HOME", '--b="x"', "--c=\\d", "--d={n}")
    mine = job.Job("mine", odd, "/runs/mine", "/runs/mine", evaluate=odd)
    assert json.loads(docker.render(mine).splitlines()[-1].removeprefix("ENTRYPOINT "))[:-1] == list(odd)
    assert yaml.safe_load(kubernetes.render(mine))["spec"]["template"]["spec"]["containers"][0]["command"] == list(odd)


def test_the_pipeline_evaluates_the_best_weights(capsys: pytest.CaptureFixture[str]) -> None:
    text = _rendered(capsys, "kfp", "digits")
    compile(text, "pipeline.py", "exec")
    assert '"--checkpoint=best"' in text and ".after(trained)" in text
    assert '["trainer-kit", "evals", "/runs/digits"]' in text and "dsl.ExitHandler" in text
    assert '"--checkpoint=latest"' in _rendered(capsys, "kfp", "digits", "--mode=train")


def test_a_run_without_a_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert "give the name of its experiment" in _refused(capsys, "kfp", str(tmp_path))
    (tmp_path / "manifest.json").write_text('{"command": ["-c"]}')
    assert "it was python -c" in _refused(capsys, "kfp", str(tmp_path))


def test_the_modules_of_an_experiment_are_in_its_command() -> None:
    from trainer_kit.config.resolve import Sources
    from trainer_kit.config.schema.experiment import TrainerConfig

    sources = Sources(gin_params=("A.b = 1",))
    made = job_commands.of_experiment("mine", sources, ["mine.py"], TrainerConfig(), "train", "/runs/mine", [])
    values = parse_flags(made.train[2:])
    assert (values.import_module, values.gin_params) == (["mine.py"], ["A.b = 1"])
    assert shlex.join(made.train).startswith("python -m trainer_kit.train --experiment=mine --mode=train")
