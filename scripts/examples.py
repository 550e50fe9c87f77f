"""Reads the examples in Markdown pages: Python files, and the commands that run them.

A page marks them by comments at the start of a line. `<!-- example: NAME.py -->` before a Python
block makes it a file of that name, `<!-- run: NAME -->` before a Bash block makes it a command that
has to end with 0 (`<!-- run: NAME, exit 2 -->`: with 2), and `<!-- needs: NAME.py -->` takes a file
from the page that has it. `<!-- requires: PACKAGE -->` names an optional package.
tests/process/docs/test_examples.py runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.source_files import ROOT

_EXAMPLE = re.compile(
    r"^<!-- example: (\S+\.py) -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_RUN = re.compile(
    r"^<!-- run: ([^,\n]+?)(?:, exit (\d+))? -->\n```bash\n(.*?)^```", re.DOTALL | re.MULTILINE
)
_NEEDS = re.compile(r"^<!-- needs: (\S+) -->", re.MULTILINE)
_REQUIRES = re.compile(r"^<!-- requires: (\S+) -->", re.MULTILINE)
_MARKER = re.compile(r"^(?:<!-- run: .*?-->|<!-- example: \S+\.py -->)", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A block of commands that a page runs.

    Attributes:
      name: What the page calls it.
      text: The commands, for Bash.
      code: The exit code that it has to end with.
    """

    name: str
    text: str
    code: int


@dataclass(frozen=True)
class Page:
    """A page with its marked examples.

    Attributes:
      path: Its path in the checkout.
      files: The text of each Python file by name.
      needs: Names of files from other pages.
      commands: What is run, in order.
      requires: Names of optional packages, without which the commands do not run.
      lost: Markers that are not followed by a block of their kind.
    """

    path: str
    files: dict[str, str]
    needs: tuple[str, ...]
    requires: tuple[str, ...]
    commands: tuple[Command, ...]
    lost: tuple[str, ...]


def read_page(path: str, text: str) -> Page:
    """Returns the marked examples of a page with this text."""
    files = dict(_EXAMPLE.findall(text))
    commands = tuple(
        Command(name, block, int(code or 0)) for name, code, block in _RUN.findall(text)
    )
    needs = tuple(_NEEDS.findall(text))
    requires = tuple(_REQUIRES.findall(text))
    whole = {
        match[0].split("\n")[0] for pattern in (_EXAMPLE, _RUN) for match in pattern.finditer(text)
    }
    lost = tuple(match[0] for match in _MARKER.finditer(text) if match[0] not in whole)
    return Page(path, files, needs, requires, commands, lost)


def read_pages(root: Path = ROOT) -> list[Page]:
    """Returns README.md and every page of docs/."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [
        read_page(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    ]


def collect_files(page: Page, pages: Iterable[Page]) -> dict[str, str]:
    """Returns the page's files, and those that it needs from the last of `pages` that has them.

    Raises:
      KeyError: when no page has a file that is needed.
    """
    everywhere = {name: text for other in pages for name, text in other.files.items()}
    return {**{name: everywhere[name] for name in page.needs}, **page.files}
