"""`python -m trainer_kit.train`: what is printed, the exit codes, and what is told before
TensorFlow is needed.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.modes import MODES
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.files import read_json_lines
from trainer_kit.run.flags import build_request, define_flags, parse_flags
from trainer_kit.run.preflight import check_request
from trainer_kit.train import get_attempts_dir, main

_numbers = itertools.count()
Supervised = tuple["subprocess.CompletedProcess[str]", set[str]]
Restarted = Callable[[str], tuple[Path, Supervised]]


@pytest.fixture
def name() -> str:
    """The name of an experiment."""
    name = f"flagged_{next(_numbers)}"
    register_experiment(name)(lambda: ExperimentConfig(trainer={"train_steps": 10}))
    return name


def _main(*arguments: str) -> int:
    return main(["train", *arguments])


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_names_every_flag_and_mode(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(flag) == 0

    text = capsys.readouterr().out
    for name in set(define_flags()) - {"h"}:
        assert f"--{name}" in text or f"--[no]{name}" in text, name
    for mode in MODES:
        assert mode in text


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "a flag": (["--experment=a"], ["--experment: no such flag; did you mean --experiment"]),
    "no flag": (["experiment=a"], ["'experiment=a' is not a flag; flags begin with --"]),
    "a value": (["--debug=maybe"], ["flag --debug=maybe: "]),
    "no value": (["--mode"], ["mode"]),
    "nothing": (
        [],
        [
            "3 mistakes",
            "--experiment: is needed; see --help",
            "--mode: is needed",
            "--model_dir: is needed",
        ],
    ),
    "names": (
        ["--experiment={name}x", "--mode=trian", "--model_dir=anywhere"],
        [
            "2 mistakes",
            "no experiment is called '{name}x'; did you mean",
            "no mode is called 'trian'",
        ],
    ),
    "without a supervisor": (["--max_restarts=5", "--mode=train"], ["--model_dir: is needed"]),
    "the tf.data service": (
        [
            "--experiment={name}",
            "--mode=train",
            "--model_dir=anywhere",
            "--tf_data_service=grpc://host:5000",
        ],
        ["error: --tf_data_service: no reader of this release uses the tf.data service"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_flags_are_told_together(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, messages = MISTAKES[mistake]
    assert _main(*(argument.format(name=name) for argument in arguments)) == 2

    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    for message in messages:
        assert message.format(name=name) in printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--debug"], True),
        (["--debug=true"], True),
        (["--debug", "--nodebug"], False),
        ([], False),
        (["--debug", "--moode=train"], True),
    ],
)
def test_debug_shows_the_traceback(
    arguments: list[str], shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main("--mode=trian", *arguments) == 2
    assert ("Traceback" in capsys.readouterr().err) == shown


def test_debug_shows_the_failing_line_of_a_users_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing.py").write_text("import no_such_library\n")
    arguments = (
        "--experiment=a",
        "--mode=train",
        "--model_dir=b",
        f"--import_module={tmp_path}/failing.py",
    )

    assert _main(*arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert _main(*arguments, "--debug") == 2
    assert "ModuleNotFoundError: No module named 'no_such_library'" in capsys.readouterr().err


@pytest.mark.parametrize("mode", MODES)
def test_an_unwritable_model_dir_is_exit_6_in_every_mode(
    name: str, mode: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    flags = (
        f"--experiment={name}",
        f"--model_dir={tmp_path}/file/run",
        "--checkpoint=best",
        "--params_override=task.init_checkpoint=elsewhere",
    )
    assert _main(*flags, f"--mode={mode}") == 6


def test_the_flag_of_the_tpu_wins_over_every_other_source(name: str) -> None:
    values = parse_flags(
        [
            "train",
            f"--experiment={name}",
            "--mode=continuous_eval",
            "--model_dir=anywhere",
            "--tpu=local",
            "--params_override=runtime.tpu=other",
        ]
    )
    resolved = check_request(build_request(values))

    assert resolved.config.runtime.tpu == "local"
    assert resolved.origins["runtime.tpu"] == "--tpu"


# An experiment's file that ends as FOLDER/ends tells for each import; the first one is the
# supervisor's, for a look.
_FAILING = """
import os
from pathlib import Path
import trainer_kit
from trainer_kit.errors import DataError

folder = Path(os.environ["FOLDER"])
number = len(list(folder.glob("import-*")))
(folder / f"import-{number}").touch()
print("import", number, flush=True)
end = (folder / "ends").read_text().split()[number]
if end == "preempted":
    os._exit(75)
if end == "crash":
    raise RuntimeError("the crash")
if end == "no-data":
    raise DataError("there is no data")


@trainer_kit.register_experiment("a")
def create():
    return trainer_kit.ExperimentConfig(trainer={"train_steps": 10})
"""


# The command, which tells at its end whether it has imported TensorFlow.
_SUPERVISOR = """
import sys
from trainer_kit.train import main

code = main()
print("tensorflow" in sys.modules)
sys.exit(code)
"""


def _run_supervised(folder: Path, ends: str, *flags: str, mode: str = "train") -> Supervised:
    """Runs the file under a supervisor; returns it with the flags that each run is to have."""
    (folder / "failing.py").write_text(_FAILING)
    (folder / "ends").write_text(ends)
    common = [
        f"--model_dir={folder}/run",
        f"--import_module={folder}/failing.py",
        f"--mode={mode}",
        "--experiment=a",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _SUPERVISOR, "--max_restarts=3", *common, *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "FOLDER": str(folder)},
    )
    return done, {*common, *flags}


_RESTARTED: dict[str, tuple[list[str], dict[str, str]]] = {
    "trainer": (["look preempted crash no-data", "--from_step=0"], {}),
    "sidecar": (["look crash crash no-data", "--eval_name=test_set"], {"mode": "continuous_eval"}),
}


@pytest.fixture(scope="module")
def run_restarted(tmp_path_factory: pytest.TempPathFactory) -> Restarted:
    """By the name of a command: its folder, and how it ended.

    All run at once: most of each is a wait for a restart.
    """
    folders = {name: tmp_path_factory.mktemp("restarted") for name in _RESTARTED}

    @functools.cache
    def run_all() -> dict[str, Supervised]:
        with ThreadPoolExecutor(len(folders)) as pool:
            runs = {
                name: pool.submit(_run_supervised, folders[name], *arguments, **options)
                for name, (arguments, options) in _RESTARTED.items()
            }
        return {name: run.result() for name, run in runs.items()}

    return lambda name: (folders[name], run_all()[name])


def test_with_restarts_the_same_flags_run_in_a_child_process(run_restarted: Restarted) -> None:
    folder, (done, flags) = run_restarted("trainer")
    assert done.returncode == 5, done.stderr
    assert done.stdout == "import 0\nimport 1\nimport 2\nimport 3\nFalse\n"
    assert "RuntimeError: the crash" in done.stderr
    assert "error: there is no data" in done.stderr
    assert "attempt 3: data after" in done.stderr

    records = list(read_json_lines(folder / "run" / "attempts.jsonl"))
    assert [record["exit_code"] for record in records] == [75, 1, 5]
    assert records[0]["command"][:3] == [sys.executable, "-m", "trainer_kit.train"]
    # The run has not begun, so each attempt gets --from_step.
    for record in records:
        assert set(record["command"][3:]) == flags
    assert "  RuntimeError: the crash" in records[1]["log"]


def test_a_supervised_sidecar_has_attempts_of_its_own(run_restarted: Restarted) -> None:
    folder, (done, _) = run_restarted("sidecar")
    assert done.returncode == 5, done.stderr
    assert not (folder / "run" / "attempts.jsonl").exists()

    records = list(read_json_lines(folder / "run" / "evals" / "test_set" / "attempts.jsonl"))
    assert [record["exit_code"] for record in records] == [1, 1, 5]


def test_with_restarts_an_early_failure_is_reported_at_once(tmp_path: Path) -> None:
    done, _ = _run_supervised(tmp_path, "no-data")
    assert (done.returncode, done.stdout) == (5, "import 0\nFalse\n")
    assert "there is no data" in done.stderr
    assert "attempt" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_with_restarts_a_mistake_is_reported_once(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--experiment={name}x", "--mode=trian", f"--model_dir={tmp_path}/run")
    assert _main("--max_restarts=5", *flags) == 2
    assert capfd.readouterr().err.count("no mode is called 'trian'") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "worker", "folder"),
    [
        (["--mode=train"], 0, "run"),
        (["--mode=train_and_post_eval"], 0, "run"),
        (["--mode=eval", "--eval_name=test_set"], 0, "run/evals/eval"),
        (["--mode=continuous_eval"], 0, "run/evals/continuous_eval"),
        (["--mode=continuous_eval", "--eval_name=test_set"], 0, "run/evals/test_set"),
        (["--mode=train"], 2, "run/workers/2"),
    ],
)
def test_attempts_of_sidecars_and_workers_have_their_own_folder(
    flags: list[str], worker: int, folder: str
) -> None:
    values = parse_flags(["train", "--model_dir=run", *flags])
    config = ExperimentConfig().replace(
        runtime={"worker_hosts": "a:1,b:1,c:1", "task_index": worker}
    )
    assert get_attempts_dir(values, config) == folder
