"""`trainer-kit list`, as a user runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
Command = Callable[..., subprocess.CompletedProcess[str]]


def test_local_experiments_are_listed_with_descriptions(trainer_kit: Command) -> None:
    done = trainer_kit("list", folder=ROOT)
    assert (done.returncode, done.stderr) == (0, "")

    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["digits"].startswith("Returns the config of `digits`")
    assert list(lines) == sorted(lines)


def test_modules_that_are_named_are_listed_in_columns(trainer_kit: Command) -> None:
    done = trainer_kit("list", "--import_module=mine.py")
    assert done.stdout == "mine/small   A small one.\nmine/untold\n"


def test_local_and_named_experiments_are_listed_together(trainer_kit: Command, here: Path) -> None:
    text = (here / "mine.py").read_text().replace("mine/", "local/")
    (here / "experiments").mkdir()
    (here / "experiments" / "local.py").write_text(text)

    done = trainer_kit("list", "--import_module=mine")

    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["local/small", "local/untold", "mine/small", "mine/untold"]


def test_a_folder_without_experiments_says_where_to_look(trainer_kit: Command) -> None:
    done = trainer_kit("list")
    assert done.returncode == 0

    message = "no experiments here; go to a folder that has experiments/, or name a module with"
    assert message in done.stdout


def test_a_broken_package_is_told_and_the_others_are_listed(
    trainer_kit: Command, here: Path
) -> None:
    for name, text in (
        ("bad", "import no_such_library\n"),
        ("mine", (here / "mine.py").read_text()),
    ):
        (here / "experiments" / name).mkdir(parents=True)
        (here / "experiments" / name / "__init__.py").write_text(text)

    done = trainer_kit("list")

    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["mine/small", "mine/untold"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("not listed: experiments.bad cannot be imported: ")
    assert "bad/__init__.py:1: No module named 'no_such_library'" in line


def test_experiments_of_model_garden_are_listed_when_asked_for(process: Command) -> None:
    done = process("list", "--all", "--import_module=mine")

    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == sorted(names)
    for name in ("mine/small", "tfm/mock", "tfm/resnet_imagenet", "tfm/bert/sentence_prediction"):
        assert name in names
    assert "mock" not in names
