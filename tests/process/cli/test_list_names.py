"""`trainer-kit list`, as a user runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from trainer_kit.config.discovery import list_shipped_experiments

OWN = ["mine/small", "mine/untold"]
OWN_IN_FOLDER = ["local/small", "local/untold"]
SHIPPED = list_shipped_experiments()
Command = Callable[..., subprocess.CompletedProcess[str]]


def read_sentences(listing: str) -> dict[str, str]:
    """Returns the sentence about each name."""
    parts = (line.partition(" ") for line in listing.splitlines())
    return {name: sentence.strip() for name, _, sentence in parts}


def test_shipped_local_and_named_experiments_are_listed(trainer_kit: Command, here: Path) -> None:
    text = (here / "mine.py").read_text().replace("mine/", "local/")
    (here / "experiments").mkdir()
    (here / "experiments" / "local.py").write_text(text)

    done = trainer_kit("list", "--import_module=mine")
    assert (done.returncode, done.stderr) == (0, "")

    sentences = read_sentences(done.stdout)
    assert list(sentences) == sorted([*SHIPPED, *OWN, *OWN_IN_FOLDER])
    assert sentences["mine/small"] == "A small one."
    assert sentences["mine/untold"] == ""
    assert sentences["digits"] == "Scanned handwritten digits and a small convolutional net."


def test_an_own_experiment_hides_a_shipped_one_of_its_name(
    trainer_kit: Command, here: Path
) -> None:
    (here / "mine.py").write_text((here / "mine.py").read_text().replace("mine/small", "digits"))

    done = trainer_kit("list", "--import_module=mine")

    assert read_sentences(done.stdout)["digits"] == "A small one."


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
    assert {*OWN} < {line.split()[0] for line in done.stdout.splitlines()}
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
