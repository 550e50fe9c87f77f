"""Describes the user's code for the manifest: the git commit, and a hash of each module's file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_kit.errors.user_frames import is_user_file

_GIT_TIMEOUT_SECONDS = 5.0


def describe_code(task_class: type) -> dict[str, Any]:
    """Returns what the manifest records of the user's code.

    The modules are those that are imported by now, that are neither installed nor part of Python or
    trainer_kit, and that lie below the working directory or in a folder from which the module of
    the task or the main program is imported. Their names are relative to such a folder, so they do
    not depend on the working directory. A cell of a notebook has no file and is not recorded.

    Args:
      task_class: The class of the task.

    Returns:
      `git`: the commit of the code, and whether files in its repository have changed since. Empty
      without git. `modules`: a hash of each file by its name.
    """
    folders = [Path.cwd()]
    for module_name in (task_class.__module__, "__main__"):
        if location := _locate(module_name):
            folder, _ = location
            folders.insert(0, folder)

    hashes = {}
    for module_name in sorted(sys.modules):
        location = _locate(module_name)
        if location is None:
            continue
        folder, name = location
        is_beside_task = any(folder.is_relative_to(parent) for parent in folders)
        if is_beside_task:
            path = folder / name
            content = path.read_bytes()
            digest = hashlib.sha256(content)
            hashes[name] = digest.hexdigest()
    git_state = read_git_state(folders[0])
    return {"git": git_state, "modules": hashes}


def read_git_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the commit of the repository around `folder`, and whether its files have changed.

    Files that git does not track do not count. Writes nothing to the repository.

    Returns:
      The values `commit` and `dirty`. {} without git, a repository or a commit, or if git takes
      longer than five seconds.
    """
    # The file system monitor of a repository is a program, which is not started.
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false", "-C", os.fspath(folder)]
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        result = subprocess.run(
            ["git", *options, *describe],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    description = result.stdout.strip()
    commit, _, suffix = description.partition("-")
    return {"commit": commit, "dirty": suffix == "dirty"}


def describe_code_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a phrase that names the modules whose files differ between two manifests.

    Modules that only one of them has do not count: another mode imports other modules. The list is
    empty if there is no difference, or if the run began with a release that recorded no modules.
    """
    old_hashes = before.get("modules", {})
    new_hashes = now.get("modules", {})
    changed = []
    for name, digest in new_hashes.items():
        old_digest = old_hashes.get(name, digest)
        if old_digest != digest:
            changed.append(name)
    if not changed:
        return []
    names = ", ".join(changed)
    return [f"code: {names} changed since the last start of this run"]


def _locate(module_name: str) -> tuple[Path, str] | None:
    """Returns the folder that a module of the user is imported from, and its file in that folder.

    Returns None for any other module, and for one without a file.
    """
    # A lazy module would be imported if it were asked for an attribute.
    module = sys.modules.get(module_name)
    attributes = getattr(module, "__dict__", {})
    file = attributes.get("__file__")
    if not isinstance(file, str):
        return None
    path = Path(file).absolute()
    if not is_user_file(str(path)) or not path.is_file():
        return None

    depth = module_name.count(".") + 1
    if path.stem == "__init__":
        depth += 1
    folder_parts = path.parts[:-depth]
    name_parts = path.parts[-depth:]
    folder = Path(*folder_parts)
    name = "/".join(name_parts)
    return folder, name
