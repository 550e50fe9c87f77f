"""The examples of README.md and docs/ run as they are printed."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.examples import Command, Page, files_of, read_page, read_pages
from scripts.source_files import ROOT
from trainer_kit.cli.main import main
from trainer_kit.testing import Ended, ForkServer

PAGES = read_pages()
_TRAIN, _KIT, _SCRIPT = "python -m trainer_kit.train ", "trainer-kit ", re.compile(r"python (\w+\.py)")
_FILE = re.compile(r"(cat > \S+ <<'(\w+)'\n.*?\n\2\n)(.*)", re.DOTALL)  # a file, and the commands after it
_SHELL = set("&|;$`#<>*\n")  # what needs a shell
_BIN = Path(sys.executable).parent  # not resolved: python3.11 of a virtual environment links to another folder


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Runs commands of Python alone without the seconds that an import of TensorFlow takes."""
    with ForkServer() as running:
        yield running


def script(path: str) -> None:
    """Does what `python PATH` does."""
    sys.path.insert(0, os.getcwd())
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def kit(*arguments: str) -> None:
    """Does what `trainer-kit ARGUMENTS` does."""
    sys.exit(main(list(arguments)))


def _ended(line: str, folder: Path, server: ForkServer) -> Ended | None:
    """Returns how the fork server has run a command; None for a command that is not Python alone."""
    if _SHELL.intersection(line):
        return None
    if line.startswith(_TRAIN):
        return server.run("train", *shlex.split(line.removeprefix(_TRAIN)), folder=str(folder))
    if line.startswith(_KIT):
        return server.run(kit, *shlex.split(line.removeprefix(_KIT)), folder=str(folder))
    found = _SCRIPT.fullmatch(line)
    return server.run(script, found[1], folder=str(folder)) if found else None


def _lines(command: Command) -> list[Command]:
    """Returns the lines of a command that needs no shell to hold them together; all but the last have to end with 0."""
    if found := _FILE.fullmatch(command.text):
        return [Command(command.name, found[1], 0), *_lines(Command(command.name, found[3], command.code))]
    joined = command.text.replace("\\\n", " ").strip()
    if _SHELL.intersection(joined.replace("\n", "")):
        return [command]
    *before, last = joined.split("\n")
    return [*(Command(command.name, line, 0) for line in before), Command(command.name, last, command.code)]


def _run(page: Page, pages: list[Page], folder: Path, server: ForkServer) -> None:
    """Writes the page's files into `folder` and runs its commands there, in order."""
    folder.mkdir(exist_ok=True)
    for shared in ("experiments", "configs"):  # what commands find in the checkout
        (folder / shared).symlink_to(ROOT / shared)
    for name, text in files_of(page, pages).items():
        (folder / name).write_text(text)
    environment = {**os.environ, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for command in [line for block in page.commands for line in _lines(block)]:
        if (ended := _ended(command.text, folder, server)) is not None:
            assert ended.code == command.code, f"{page.path}, {command.name}: {command.text}\n{ended.text}"
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.text], cwd=folder, env=environment, text=True, timeout=300,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == command.code, f"{page.path}, {command.name}: {command.text}\n{done.stdout}"


@pytest.mark.parametrize("page", [pytest.param(page, id=page.path) for page in PAGES if page.commands])
def test_the_commands_of_a_page_end_as_it_says(page: Page, server: ForkServer, tmp_path: Path) -> None:
    _run(page, PAGES, tmp_path, server)


@pytest.mark.parametrize("page", [pytest.param(page, id=page.path) for page in PAGES])
def test_markers_stand_before_blocks_that_can_be_read(page: Page) -> None:
    assert page.lost == ()
    for name, text in files_of(page, PAGES).items():
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
    assert (page.needs, page.lost) == (("other.py",), ())


def test_an_example_uses_a_file_of_another_page(server: ForkServer, tmp_path: Path) -> None:
    other = read_page("b.md", "<!-- example: other.py -->\n```python\nNUMBER = 7\n```\n")
    page = read_page("a.md", _TEXT)
    _run(page, [page, other], tmp_path, server)


@pytest.mark.parametrize("line", ["# it's a comment", "cat <<'END'\nit's a text\nEND", "test x = x > 'a file'"])
def test_what_only_a_shell_can_read_is_given_to_a_shell(line: str, server: ForkServer, tmp_path: Path) -> None:
    _run(read_page("a.md", f"<!-- run: shell -->\n```bash\n{line}\n```\n"), [], tmp_path, server)


def test_every_line_of_a_command_has_to_pass(server: ForkServer, tmp_path: Path) -> None:
    fails = "<!-- example: one.py -->\n```python\nraise SystemExit(3)\n```\n<!-- run: one, exit 3 -->\n```bash\n"
    _run(read_page("a.md", f"{fails}true\npython one.py\n```\n"), [], tmp_path / "last", server)
    with pytest.raises(AssertionError, match=r"a\.md, one: python one\.py\n"):
        _run(read_page("a.md", f"{fails}python one.py\ntrue\n```\n"), [], tmp_path / "first", server)


def test_a_command_that_fails_is_told_with_its_output(server: ForkServer, tmp_path: Path) -> None:
    page = read_page("a.md", "<!-- run: broken -->\n```bash\necho before\nfalse | true\necho after\n```\n")
    with pytest.raises(AssertionError, match=r"a\.md, broken: echo before\n"):
        _run(page, [page], tmp_path, server)


def test_a_marker_without_its_block_is_noticed() -> None:
    text = "<!-- run: one -->\n\n```bash\ntrue\n```\n<!-- example: two.py -->\n```bash\n```\n"
    assert read_page("a.md", text).lost == ("<!-- run: one -->", "<!-- example: two.py -->")
