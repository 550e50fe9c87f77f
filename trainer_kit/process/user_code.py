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
    trainer_kit, and that lie below the folder from which the module of the task is imported. For a
    task of trainer_kit or an installed package it is the folder of the main program, and in a
    notebook the working directory. Their names are relative to this folder. A cell of a notebook
    has no file and is not recorded.

    Args:
      task_class: The class of the task.

    Returns:
      `git`: the commit of the code, and whether files in its repository have changed since. Empty
      without git. `modules`: a hash of each file by its name.
    """
    paths = _find_user_files()
    root = Path.cwd()
    for module_name in ("__main__", task_class.__module__):
        if module_name in paths:
            depth = module_name.count(".")
            root = paths[module_name].parents[depth]

    hashes = {}
    for path in sorted(paths.values()):
        if path.is_relative_to(root):
            content = path.read_bytes()
            digest = hashlib.sha256(content)
            name = path.relative_to(root).as_posix()
            hashes[name] = digest.hexdigest()
    git_state = read_git_state(root)
    return {"git": git_state, "modules": hashes}


def read_git_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the commit of the repository around `folder`, and whether its files have changed.

    Files that git does not track do not count. Writes nothing to the repository.

    Returns:
      The values `commit` and `dirty`. {} without git, a repository or a commit, or if git takes
      longer than five seconds.
    """
    # The file system monitor of a repository is a program, which is not started.
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false"]
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        result = subprocess.run(
            ["git", *options, *describe],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    description = result.stdout.strip()
    commit = description.removesuffix("-dirty")
    return {"commit": commit, "dirty": commit != description}


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


def _find_user_files() -> dict[str, Path]:
    """Returns the file of each imported module of the user, by the name of the module."""
    paths = {}
    for name, module in list(sys.modules.items()):
        # A lazy module would be imported if it were asked for an attribute.
        attributes = getattr(module, "__dict__", {})
        file = attributes.get("__file__")
        # A namespace package has no file.
        path = Path(file or "").absolute()
        if path.is_file() and is_user_file(str(path)):
            paths[name] = path
    return paths
