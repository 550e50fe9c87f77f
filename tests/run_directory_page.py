"""The table of a run's files in docs/reference/run_directory.md."""

from __future__ import annotations

import re

from scripts.source_files import ROOT

_ROW = re.compile(r"^\| `([^`]+)` \| (.*?)(?: Its name is `([^`]+)`\.)? \|", re.MULTILINE)

# The path of each file or folder in model_dir; `<...>` stands for what differs, and a folder ends
# with a slash.
PATHS: list[str] = []
# The config fields that name a folder, with the default.
NAMED_BY: dict[str, str] = {}
for _path, _, _field in _ROW.findall((ROOT / "docs/reference/run_directory.md").read_text()):
    PATHS.append(_path)
    if _field:
        NAMED_BY[_field] = _path


def matches(row: str, path: str) -> bool:
    """Whether `path`, relative to model_dir, is the file of a row or lies in its folder."""
    parts = [re.escape(part) for part in re.split(r"<\w+>", row)]
    pattern = r"[^/]+".join(parts)
    if row.endswith("/"):
        pattern += ".*"
    return re.fullmatch(pattern, path) is not None


def is_in_table(path: str) -> bool:
    """Whether the table has `path`, relative to model_dir."""
    return any(matches(row, path) for row in PATHS)
