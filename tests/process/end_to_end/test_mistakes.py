"""The mistakes of scripts/mistakes.py, each through the real command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.code_mistakes import CODE_MISTAKES, CodeMistake
from scripts.mistakes import (
    MISTAKES,
    ROOT,
    CommandMistake,
    find_missing_parts,
    is_reported,
    run_mistake,
    run_module,
)
from tests.fork_server import ForkServer
from tests.process.end_to_end.late_commands import answer

_EARLY = [mistake for mistake in MISTAKES if not mistake.needs_tensorflow]
_LATE = [mistake for mistake in MISTAKES if mistake.needs_tensorflow]
# A command, by its arguments: its exit code and its output.
Run = Callable[[list[str]], tuple[int, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def commands() -> Iterator[subprocess.Popen[str]]:
    """Runs commands in forks of a process that has imported what they need, without TensorFlow."""
    command = [sys.executable, "-m", "tests.process.end_to_end.early_commands"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate()


@pytest.fixture(scope="module")
def run_late(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs commands one after the other in one process that has TensorFlow."""
    folder = tmp_path_factory.mktemp("late")
    requests = folder / "requests"
    replies = folder / "replies"
    for fifo in (requests, replies):
        os.mkfifo(fifo)
    server.start(answer, str(requests), str(replies), folder=str(ROOT))
    with requests.open("w") as lines, replies.open() as codes:

        def run(arguments: list[str]) -> tuple[int, str]:
            errors = tmp_path_factory.mktemp("errors") / "text"
            print(json.dumps([arguments, str(errors)]), file=lines, flush=True)
            return int(codes.readline()), errors.read_text()

        yield run


@pytest.fixture
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, the same for all: AutoGraph takes equal functions of two files for one, and
    names the first.
    """
    folder = tmp_path_factory.getbasetemp() / "mine"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("mistake", _EARLY, ids=lambda mistake: mistake.name.replace(" ", "_"))
def test_a_mistake_gets_one_message_and_leaves_nothing(
    mistake: CommandMistake,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    commands: subprocess.Popen[str],
) -> None:
    def run(arguments: list[str]) -> tuple[int, str]:
        errors = tmp_path_factory.mktemp("errors") / "text"
        assert commands.stdin is not None and commands.stdout is not None
        print(json.dumps([arguments, str(errors)]), file=commands.stdin, flush=True)
        return int(commands.stdout.readline()), errors.read_text()

    outcome = run_mistake(mistake, tmp_path, run)

    assert outcome.code == mistake.code, outcome.text
    assert mistake.expected.replace("{folder}", str(tmp_path)) in outcome.text
    assert "Traceback" not in outcome.text
    assert outcome.written == []
    assert not outcome.imported_tensorflow
    assert is_reported(mistake, outcome, tmp_path)


def test_the_real_command_tells_a_mistake(tmp_path: Path) -> None:
    mistake = _EARLY[0]
    outcome = run_mistake(mistake, tmp_path)
    assert is_reported(mistake, outcome, tmp_path), outcome.text


@pytest.mark.parametrize("mistake", _LATE, ids=lambda mistake: mistake.name.replace(" ", "_"))
def test_a_mistake_that_needs_tensorflow_gets_one_message_too(
    mistake: CommandMistake, tmp_path: Path, run_late: Run
) -> None:
    outcome = run_mistake(mistake, tmp_path, run_late)
    assert outcome.code == mistake.code, outcome.text
    assert mistake.expected.replace("{folder}", str(tmp_path)) in outcome.text
    assert "Traceback" not in outcome.text
    assert outcome.written == []


@pytest.mark.parametrize(
    "mistake", CODE_MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "_")
)
def test_an_error_of_own_code_shows_the_line_and_the_shapes(
    mistake: CodeMistake, mine: Path, run_late: Run, server: ForkServer
) -> None:
    def run(arguments: list[str]) -> tuple[int, str]:
        end = server.run("train", *arguments, folder=str(ROOT))
        return end.code, end.text

    needs_own_process = "runtime." in mistake.overrides
    code, text = run_module(mistake, mine, run if needs_own_process else run_late)

    assert find_missing_parts(mistake, code, text, mine) == [], text


def test_the_sample_in_the_guide_is_what_is_printed() -> None:
    text = (ROOT / "docs" / "guides" / "config.md").read_text()
    block = next(
        part
        for part in text.split("```")
        if part.strip().startswith("$ python -m trainer_kit.train ")
    )
    command, *expected = block.strip().splitlines()
    arguments = [sys.executable, *command.split()[2:]]

    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert done.stderr.splitlines() == expected


def test_the_mistakes_have_names_of_their_own() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 30
