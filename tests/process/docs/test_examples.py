"""The examples of README.md and docs/ run as they are printed."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from scripts.examples import Command, Page, collect_files, read_page, read_pages
from scripts.source_files import ROOT
from tests.fork_server import Child, ForkServer
from tests.process.docs.page_process import run_in_background, serve

PAGES = read_pages()
_PYTHON = re.compile(r"(\w+=\S* )*(python -m trainer_kit\.train|python \w+\.py|trainer-kit) ?")
# A command that writes a file.
_FILE = re.compile(r"^cat > \S+ <<'(\w+)'\n.*?\n\1\n", re.DOTALL | re.MULTILINE)
_SHELL = set("&|;$`#<>*\0")  # what needs a shell
_LONGEST = 300.0  # seconds of a command
_BACKGROUND = " &"  # ends a command that the next ones do not wait for
# Not resolved: python3.11 of a virtual environment links to another folder.
_BIN = Path(sys.executable).parent


class Runner:
    """Runs commands: those of Python alone in one process without cold starts, others by Bash."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._child: Child | None = None
        self._commands: Connection | None = None
        self.background: list[Child] = []

    def run(self, line: str, folder: Path) -> tuple[int, str]:
        """Returns the exit code of a command and its output; `wait` has the largest code of those
        that it ends.
        """
        if line == "wait":
            ends = [self.background.pop(0).wait() for _ in [*self.background]]
            code = max((abs(end.code) for end in ends), default=0)
            return code, "".join(end.text for end in ends)
        if not _PYTHON.match(line) or _SHELL.intersection(line.removesuffix(_BACKGROUND)):
            return _run_bash(line, folder)
        if line.endswith(_BACKGROUND):
            command = line.removesuffix(_BACKGROUND)
            child = self._server.start(run_in_background, command, folder=str(folder))
            self.background.append(child)
            return 0, ""
        return self._run_python(line, folder)

    def _run_python(self, line: str, folder: Path) -> tuple[int, str]:
        if self._child is None or self._commands is None or not self._child.alive:
            self._commands, other_end = multiprocessing.Pipe()
            self._child = self._server.start(serve, other_end)
            other_end.close()
        before = len(self._child.text)
        self._commands.send((str(folder), line))
        if not self._commands.poll(_LONGEST):
            self._child.kill()
            raise TimeoutError(
                f"{line} has not ended; it has written:\n{self._child.text[before:]}"
            )
        try:
            code = self._commands.recv()
        except (EOFError, OSError):  # the command has ended the process
            code = self._child.wait().code
        return code, self._child.text[before:]


def _run_bash(text: str, folder: Path) -> tuple[int, str]:
    environment = {
        **os.environ,
        "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        text=True,
        timeout=_LONGEST,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One process for the commands of all pages."""
    with ForkServer() as server:
        yield Runner(server)


def _split_lines(command: Command) -> list[Command]:
    """Returns the lines of a command that needs no shell to hold them together; all but the last
    have to end with 0.
    """
    files = [match[0] for match in _FILE.finditer(command.text)]
    lines = _FILE.sub("\0\n", command.text).replace("\\\n", " ").strip().split("\n")
    if any(_SHELL.intersection(line.removesuffix(_BACKGROUND)) for line in lines if line != "\0"):
        return [command]
    *before, last = [files.pop(0) if line == "\0" else line for line in lines]
    return [
        *(Command(command.name, line, 0) for line in before),
        Command(command.name, last, command.code),
    ]


def _run_page(page: Page, pages: list[Page], folder: Path, runner: Runner) -> None:
    """Writes the page's files into `folder` and runs its commands there, in order."""
    folder.mkdir(exist_ok=True)
    for shared in ("configs",):  # what commands find in the checkout
        (folder / shared).symlink_to(ROOT / shared)
    for name, text in collect_files(page, pages).items():
        (folder / name).write_text(text)
    for command in [line for block in page.commands for line in _split_lines(block)]:
        code, text = runner.run(command.text, folder)
        assert code == command.code, f"{page.path}, {command.name}: {command.text}\n{text}"
    assert not runner.background, (
        f"{page.path}: the last command has to wait for those in the background"
    )


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.path) for page in PAGES if page.commands]
)
def test_the_commands_of_a_page_end_as_it_says(page: Page, runner: Runner, tmp_path: Path) -> None:
    for package in page.requires:
        pytest.importorskip(package)
    _run_page(page, PAGES, tmp_path, runner)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.path) for page in PAGES])
def test_markers_stand_before_blocks_that_can_be_read(page: Page) -> None:
    assert page.lost == ()
    for name, text in collect_files(page, PAGES).items():
        compile(text, f"{page.path}:{name}", "exec")


_TEXT = """
<!-- needs: other.py -->

<!-- example: mine.py -->
```python
import other
print(other.NUMBER)
```

<!-- example: part -->
```python
    not whole
```

<!-- run: two, exit 3 -->
```bash
test "$(python mine.py)" = 7
exit 3
```
"""


def test_a_page_is_read_as_files_and_commands() -> None:
    page = read_page("docs/a.md", _TEXT)
    assert page.files == {"mine.py": "import other\nprint(other.NUMBER)\n"}
    assert page.commands == (Command("two", 'test "$(python mine.py)" = 7\nexit 3\n', 3),)
    assert page.needs == ("other.py",)
    assert page.lost == ()


def test_an_example_uses_a_file_of_another_page(runner: Runner, tmp_path: Path) -> None:
    other = read_page("b.md", "<!-- example: other.py -->\n```python\nNUMBER = 7\n```\n")
    page = read_page("a.md", _TEXT)
    _run_page(page, [page, other], tmp_path, runner)


def test_every_line_of_a_command_has_to_pass(runner: Runner, tmp_path: Path) -> None:
    example = "<!-- example: one.py -->\n```python\nraise SystemExit(3)\n```\n"
    command = "<!-- run: one, exit 3 -->\n```bash\n"
    fails_last = read_page("a.md", f"{example}{command}true\npython one.py\n```\n")
    fails_first = read_page("a.md", f"{example}{command}python one.py\ntrue\n```\n")

    _run_page(fails_last, [], tmp_path / "last", runner)
    with pytest.raises(AssertionError, match=r"a\.md, one: python one\.py\n"):
        _run_page(fails_first, [], tmp_path / "first", runner)


def test_a_marker_without_its_block_is_noticed() -> None:
    text = "<!-- run: one -->\n\n```bash\ntrue\n```\n<!-- example: two.py -->\n```bash\n```\n"
    assert read_page("a.md", text).lost == ("<!-- run: one -->", "<!-- example: two.py -->")
