"""`python -m trainer_kit.train`: what is printed, the exit codes, and what is told before TensorFlow is needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.config.schema import ExperimentConfig
from trainer_kit.experiment import register_experiment
from trainer_kit.files import read_lines
from trainer_kit.flags import define_flags, parse_flags, request
from trainer_kit.modes import MODES
from trainer_kit.preflight import check_request
from trainer_kit.train import main

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """The name of an experiment."""
    name = f"flagged_{next(_numbers)}"
    register_experiment(name)(ExperimentConfig)
    return name


def _main(*arguments: str) -> int:
    return main(["train", *arguments])


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_names_every_flag_and_mode(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(flag) == 0
    text = capsys.readouterr().out
    assert all(f"--{name}" in text or f"--[no]{name}" in text for name in define_flags() if name != "h")
    assert all(name in text for name in MODES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experment=a"], "--experment: no such flag; did you mean experiment"),
        (["experiment=a"], "'experiment=a' is not a flag; flags begin with --"),
        (["--debug=maybe"], "flag --debug=maybe: "),
        (["--mode"], "mode"),
    ],
)
def test_a_wrong_flag_is_one_message_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.startswith("error: ")
    assert printed.out == "" and "Traceback" not in printed.err


def test_flags_that_are_needed_are_all_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 3 mistakes")
    assert all(f"--{flag}: is needed; see --help" in error for flag in ("experiment", "mode", "model_dir"))


def test_a_misspelt_experiment_and_mode_are_told_together(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(f"--experiment={name}x", "--mode=trian", "--model_dir=anywhere") == 2
    error = capsys.readouterr().err
    assert "error: 2 mistakes" in error
    assert f"none is called '{name}x'; did you mean" in error and "no mode is called 'trian'" in error


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
def test_debug_shows_the_traceback(arguments: list[str], shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("--mode=trian", *arguments) == 2
    assert ("Traceback" in capsys.readouterr().err) == shown


def test_debug_shows_where_a_users_module_fails_beside_the_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing.py").write_text("import no_such_library\n")
    arguments = ("--experiment=a", "--mode=train", "--model_dir=b", f"--import_module={tmp_path}/failing.py")
    assert _main(*arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert _main(*arguments, "--debug") == 2
    assert "ModuleNotFoundError: No module named 'no_such_library'" in capsys.readouterr().err


@pytest.mark.parametrize("mode", MODES)
def test_a_model_dir_that_cannot_be_written_is_exit_6_in_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    common = (f"--experiment={name}", f"--model_dir={tmp_path}/file/run", "--checkpoint=best")
    assert _main(*common, f"--mode={mode}") == 6


def test_the_flag_of_the_tpu_wins_over_every_other_source(name: str) -> None:
    values = parse_flags([
        "train", f"--experiment={name}", "--mode=continuous_eval", "--model_dir=anywhere", "--tpu=local",
        "--params_override=runtime.tpu=other",
    ])  # fmt: skip
    resolved = check_request(request(values))
    assert resolved.config.runtime.tpu == "local"
    assert resolved.origins["runtime.tpu"] == "--tpu"


def test_the_tf_data_service_is_refused_while_nothing_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("--tf_data_service=grpc://host:5000") == 2
    assert "error: --tf_data_service: no reader of this release uses the tf.data service" in capsys.readouterr().err


# An experiment's file that is preempted when it is first imported, crashes the second time, and is then of no use.
_FAILING = """
import os
from pathlib import Path
from trainer_kit.errors import DataError

folder = Path(os.environ["FOLDER"])
folder.mkdir(exist_ok=True)
number = len(list(folder.glob("import-*")))
(folder / f"import-{number}").touch()
print("import", number, flush=True)
if number == 0:
    os._exit(75)
if number == 1:
    raise RuntimeError("the crash")
raise DataError("there is no data")
"""


def test_with_restarts_the_same_flags_run_in_a_process_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(_FAILING)
    monkeypatch.setenv("FOLDER", str(tmp_path / "run"))
    flags = [f"--model_dir={tmp_path}/run", f"--import_module={tmp_path}/failing.py", "--mode=train", "--experiment=a"]
    code = "import sys; from trainer_kit.train import main; c = main(); print('tensorflow' in sys.modules); sys.exit(c)"
    done = subprocess.run([sys.executable, "-c", code, "--max_restarts=2", *flags], capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert done.stdout == "import 0\nimport 1\nimport 2\nFalse\n"
    assert "RuntimeError: the crash" in done.stderr and "error: there is no data" in done.stderr
    assert "attempt 3: data after" in done.stderr
    records = list(read_lines(tmp_path / "run" / "attempts.jsonl"))
    assert [record["exit_code"] for record in records] == [75, 1, 5]
    assert records[0]["command"][:3] == [sys.executable, "-m", "trainer_kit.train"]
    assert set(records[0]["command"][3:]) == set(flags)
    assert "RuntimeError: the crash" in records[1]["log"]


def test_with_restarts_a_mistake_is_told_once_and_not_tried_again(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _main("--max_restarts=5", f"--experiment={name}x", "--mode=trian", f"--model_dir={tmp_path}/run") == 2
    assert capfd.readouterr().err.count("no mode is called 'trian'") == 1
    assert not (tmp_path / "run").exists()


def test_without_a_model_dir_a_mistake_is_told_without_a_supervisor(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("--max_restarts=5", "--mode=train") == 2
    assert "--model_dir: is needed" in capsys.readouterr().err
