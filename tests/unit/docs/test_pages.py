"""The pages about development say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import house
from scripts.source_files import ROOT
from tests.run_directory_page import is_in_table

DEVELOPMENT = ROOT / "docs" / "development"
PAGES = [ROOT / "CONTRIBUTING.md", *sorted(DEVELOPMENT.rglob("*.md"))]
_PATH = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|sh|md|yaml))?)`")


def test_the_picture_has_the_floors_in_their_order() -> None:
    page = (DEVELOPMENT / "architecture.md").read_text()
    picture = page.split("<!-- floors:")[1].split("```text\n")[1].split("```")[0]
    rows = [line.split("|")[1] for line in picture.splitlines() if "|" in line]
    drawn = [name.rstrip("/").removesuffix(".py") for row in rows for name in row.split()]

    assert drawn == list(reversed(house.FLOORS))


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in PAGES]
)
def test_every_path_that_is_named_is_there(page: Path) -> None:
    package = ROOT / "trainer_kit"
    roots = (ROOT, package, package / "compat", package / "compat" / "model_garden")
    # Neither the sample of a module and its test, nor a file of a run.
    named = [path for path in _PATH.findall(page.read_text()) if "/a/" not in path]
    named = [path for path in named if not is_in_table(path)]

    assert [path for path in named if not any((root / path).exists() for root in roots)] == []


def test_each_decision_has_the_same_parts_and_a_line_in_the_list() -> None:
    decisions = DEVELOPMENT / "decisions"
    for page in sorted(decisions.glob("*.md")):
        if page.name != "index.md":
            text = page.read_text()
            assert (
                "**Chosen.**" in text
                and "**Look again**" in text
                and re.search(r"\*\*(Measured|Counted)", text)
            ), page
            assert f"({page.name})" in (decisions / "index.md").read_text(), page
