"""The command as a whole: help, verbs, mistakes, exit codes, and what it does not import."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.builders import run_program
from trainer_kit import __version__
from trainer_kit.cli.main import CHECKPOINTS, CHECKS, VERBS, build_parser, main
from trainer_kit.config.experiment_registry import experiments
from trainer_kit.errors import EXIT_CODES
from trainer_kit.run.flag_texts import format_help_text

ROOT = Path(__file__).parents[3]
Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_help_names_every_verb_and_every_exit_code(process: Command) -> None:
    done = process("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for verb in [*VERBS, "train", "checkpoint", "doctor"]:
        assert re.search(rf"^    {verb}\s", done.stdout, re.MULTILINE)
    for code, meaning in EXIT_CODES.items():
        assert f"  {code.value:>3}  {meaning}" in done.stdout


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *(((verb,), module) for verb, module in VERBS.items()),
        *((("checkpoint", verb), module) for verb, module in CHECKPOINTS.items()),
        *((("doctor", verb), module) for verb, module in CHECKS.items()),
    ],
)
def test_every_command_has_a_help_that_begins_with_what_it_does(
    command: tuple[str, ...], module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0

    text = " ".join(capsys.readouterr().out.split())
    assert str(module.__doc__).split("\n")[0] in text
    assert f"example: {module.EXAMPLE}" in text
    assert build_parser().parse_args(shlex.split(module.EXAMPLE)[1:]).run is module.run
    assert "--debug" in text


def test_the_version_is_the_packages(trainer_kit: Command) -> None:
    assert trainer_kit("--version").stdout == f"trainer_kit {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: VERB"),
        (
            ["shwo"],
            "invalid choice: 'shwo' (choose from 'train', 'init', 'list', 'show', ",
        ),
        # There are no abbreviations.
        (["list", "--import=mine.py"], "unrecognized arguments: --import=mine.py"),
        (
            ["best", "run", "--metrc=loss"],
            "unrecognized arguments: --metrc=loss; did you mean --metric?",
        ),
        (["list", "optimzers"], "'callbacks'); did you mean optimizers?"),
        (["doctor", "resum"], "'data'); did you mean resume?"),
    ],
)
def test_a_wrong_command_line_is_exit_2_with_the_usage(
    trainer_kit: Command, arguments: list[str], message: str
) -> None:
    done = trainer_kit(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: trainer-kit")
    assert message in done.stderr


def test_the_verb_train_is_the_program_of_its_own_name(process: Command, here: Path) -> None:
    done = process("train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == format_help_text() + "\n"

    # The working directory, a path in the home, and exit codes are those of the module.
    flags = ["--experiment=mine/small", "--mode=train", f"--import_module=~/{here.name}/mine.py"]
    refused = process("train", *flags, "--model_dir=~/run", "--params_override=train_steps=0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: trainer.train_steps: 0 trains nothing; set it to")
    assert list(here.iterdir()) == [here / "mine.py"]


@pytest.mark.parametrize("debug", [False, True])
def test_an_explained_mistake_is_one_message_and_exit_2(trainer_kit: Command, debug: bool) -> None:
    options = ["--debug"] if debug else []

    done = trainer_kit("show", "mine/smal", "--import_module=mine.py", *options)

    assert (done.returncode, done.stdout) == (2, "")
    *traceback, message = done.stderr.splitlines()
    assert message.startswith(
        "error: --experiment: no experiment is called 'mine/smal'; did you mean mine/small"
    )
    assert ("import_experiment" in "".join(traceback)) == bool(traceback) == debug


def test_mistakes_of_files_and_overrides_are_in_one_report(trainer_kit: Command) -> None:
    overrides = "--params_override=trainer.train_step=7,runtime.num_gpus=x"

    done = trainer_kit(
        "show", "mine/small", "--import_module=mine.py", overrides, "--config_file=missing.yaml"
    )

    assert done.returncode == 2
    assert done.stderr.startswith("error: 3 mistakes\n")
    for name in ("trainer.train_step", "runtime.num_gpus", "missing.yaml"):
        assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_in_a_users_module_is_a_bug_with_its_traceback(
    trainer_kit: Command, here: Path
) -> None:
    (here / "broken.py").write_text("1 / 0\n")
    done = trainer_kit("list", "--import_module=broken.py")

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "broken.py" in done.stderr


@pytest.mark.parametrize("verb", ["show", "check"])
def test_an_experiment_that_exits_is_a_bug(
    verb: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"quits_{verb}"
    registered = f"@trainer_kit.register_experiment('{name}')"
    (here / f"{name}.py").write_text(
        f"import sys, trainer_kit\n\n\n{registered}\ndef quits():\n    sys.exit(0)\n"
    )
    monkeypatch.chdir(here)

    assert main([verb, name, f"--import_module={name}.py"]) == 1
    message = f"{here}/{name}.py:6: this line ends the program (SystemExit(0))"
    assert message in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(here: Path) -> None:
    arguments = ["show", "mine/small", "--import_module=mine.py"]
    code = f"import sys, trainer_kit.cli.main as m; sys.exit(m.main({arguments}))"
    command = f'{sys.executable} -c "{code}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], cwd=here, capture_output=True, text=True, timeout=60
    )

    assert (done.stdout, done.stderr) == ("0\n", "")


def test_looking_at_experiments_and_runs_does_without_tensorflow(finished_run: Path) -> None:
    commands = [
        ["list"],
        ["show", "digits"],
        ["show", "digits", "--gin_params=digits.learning_rate=3e-3"],
        ["evals", str(finished_run)],
        ["best", str(finished_run)],
    ]
    code = (
        f"import sys, trainer_kit.cli.main as m; print({{*map(m.main, {commands})}}, *sys.modules)"
    )

    done = run_program(code, cwd=ROOT)

    codes, *modules = done.stdout.splitlines()[-1].split()
    assert codes == "{0}", done.stderr
    assert "trainer_kit.experiments.digits" in modules
    assert {
        "tensorflow",
        "keras",
        "orbit",
        "numpy",
        "trainer_kit.experiments.digits.task",
    }.isdisjoint(modules)


@pytest.mark.parametrize("verb", [("export",), ("predict", "--output=rows.npz")])
def test_modules_that_a_run_names_may_be_refused(
    trainer_kit: Command, here: Path, verb: tuple[str, ...]
) -> None:
    folder = here / "run"
    folder.mkdir()
    (folder / "params.yaml").write_text("{}")
    manifest = {"experiment": "mine/small", "command": ["train.py", "--import_module=mine.py"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))

    done = trainer_kit(*verb, "run", "--import_module=none")

    assert done.returncode == 2
    assert done.stderr == (
        "error: import_modules=False: run needs mine.py; name what you trust in import_modules\n"
    )
    assert "mine/small" not in experiments
