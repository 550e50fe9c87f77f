"""The site of docs/ is built, with every link and anchor checked, and loads nothing from other
hosts.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//"
    r"|<link[^>]*stylesheet[^>]*href=\"(?:https?:)?//"
)


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed; requirements.lock has it",
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    options = ["--strict", "--quiet", "--site-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mkdocs", "build", *options]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert tmp_path / "index.html" in pages
    assert tmp_path / "reference" / "config.html" in pages
    assert [page.name for page in pages if _LOADED.search(page.read_text())] == []
    # Without this script the search does not work when the pages are read from the disk.
    assert '<script src="javascripts/iframe_worker.js">' in (tmp_path / "index.html").read_text()
