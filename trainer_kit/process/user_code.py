"""Describes the user's code for the manifest: the git commit, and a hash of each module's file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer_kit.errors.user_frames import is_user_file

_GIT_TIMEOUT_SECONDS = 5.0


def describe_code(task_class: type) -> dict[str, Any]:
    """Returns the git commit and the hashes of modules, for the manifest.

    The modules are all that the process has imported from source files of the user, and the main
    program. Installed packages, Python and trainer_kit do not count, since the manifest has their
    versions, and neither does a cell of a notebook. Experiments that come with trainer_kit count.

    Args:
      task_class: The class of the task.

    Returns:
      `git`: what `read_git_state` returns for the folder of the task's module. For a task in a
      notebook or of an installed package it is the working directory. `modules`: a hash of each
      source file by its path below the folder on sys.path.
    """
    folder = Path.cwd()
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        # The usual access to an attribute would import a lazy module.
        is_module = issubclass(type(module), ModuleType)
        attributes = object.__getattribute__(module, "__dict__") if is_module else {}
        file = attributes.get("__file__")
        # The program of a command, such as bin/trainer-kit, has no suffix.
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        # TensorFlow and Keras have thousands of modules, whose Paths would take most of the time.
        absolute_file = os.path.abspath(file)
        if not is_user_file(absolute_file):
            continue
        path = Path(absolute_file)
        # Around an experiment that comes with trainer_kit is no repository of the user.
        if name == task_class.__module__ and not name.startswith("trainer_kit."):
            folder = path.parent

        # The module layers.blocks is named layers/blocks.py, wherever the folder of layers is.
        is_package = path.stem == "__init__"
        depth = name.count(".") + is_package
        names = path.parts[-1 - depth :]
        # A cell of a notebook has no file.
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            digest = hashlib.sha256(content)
            hashes["/".join(names)] = digest.hexdigest()
    git_state = read_git_state(folder)
    return {"git": git_state, "modules": hashes}


def read_git_state(folder: Path) -> dict[str, Any]:
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
    """Returns a phrase that names the files whose hashes differ between two manifests.

    Modules that only one manifest has do not count, since another mode imports other modules. An
    experiment of the user and the one of that name that comes with trainer_kit count as one file.

    Returns:
      A list of one phrase. It is empty without a difference, and if the run began with a release
      that recorded no modules.
    """
    old_hashes = before.get("modules", {})
    new_hashes = now.get("modules", {})
    changed = []
    for name, digest in new_hashes.items():
        other_name = name.removeprefix("trainer_kit/")
        if other_name == name:
            other_name = f"trainer_kit/{name}"
        old_digest = old_hashes.get(name) or old_hashes.get(other_name, digest)
        if old_digest != digest:
            changed.append(name)
    if not changed:
        return []
    names = ", ".join(changed)
    return [f"code: {names} changed since the last start of this run"]
