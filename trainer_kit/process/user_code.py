"""Describes the user's code for the manifest: the git commit, and a hash of each module's file."""

from __future__ import annotations

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
    """Returns what the manifest records of the user's code.

    The modules are those that are imported by now, that are neither installed nor part of Python or
    trainer_kit, and that lie below the working directory or in a folder from which the module of
    the task or the main program is imported. Their names are relative to such a folder, so they do
    not depend on the working directory. A cell of a notebook has no file and is not recorded.

    Args:
      task_class: The class of the task.

    Returns:
      `git`: the commit of the code, and whether files in its repository have changed since. Empty
      without git. `modules`: a hash of each file by name, in the order of the names.
    """
    try:
        folders = [Path.cwd()]
    except OSError:
        # The working directory was removed.
        return {"git": {}, "modules": {}}
    for name in (task_class.__module__, "__main__"):
        location = _locate(sys.modules.get(name))
        if location is not None:
            folders.insert(0, location[0])

    hashes = {}
    for module in list(sys.modules.values()):
        location = _locate(module)
        if location is None:
            continue
        folder, name = location
        if not any(folder.is_relative_to(parent) for parent in folders):
            continue
        try:
            content = (folder / name).read_bytes()
        except OSError:
            continue
        digest = hashlib.sha256(content)
        hashes[name] = digest.hexdigest()[:16]
    return {"git": read_git_state(folders[0]), "modules": dict(sorted(hashes.items()))}


def read_git_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the commit of the repository around `folder`, and whether its files have changed.

    Files that git does not track do not count. Writes nothing to the repository.

    Returns:
      The values `commit` and `dirty`. {} without git, a repository or a commit, or if git takes
      longer than five seconds.
    """
    # The file system monitor of a repository is a program, which is not started.
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false", "-C", os.fspath(folder)]
    status = ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        result = subprocess.run(
            ["git", *options, *status],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}

    commit = ""
    is_dirty = False
    for line in result.stdout.decode(errors="replace").splitlines():
        if line.startswith("# branch.oid "):
            commit = line.split()[-1]
        elif not line.startswith("#"):
            is_dirty = True
    # A repository without a commit has the text "(initial)" in its place.
    if not commit.isalnum():
        return {}
    return {"commit": commit, "dirty": is_dirty}


def describe_code_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a phrase that names the modules whose files differ between two manifests.

    Modules that only one of them has do not count: another mode imports other modules. The list is
    empty if there is no difference, or if the run began with a release that recorded no modules.
    """
    old_hashes = before.get("modules")
    new_hashes = now.get("modules")
    if not isinstance(old_hashes, Mapping) or not isinstance(new_hashes, Mapping):
        return []
    changed = [
        name for name, digest in new_hashes.items() if old_hashes.get(name, digest) != digest
    ]
    if not changed:
        return []
    names = ", ".join(changed)
    return [f"code: {names} changed since the last start of this run"]


def _locate(module: ModuleType | None) -> tuple[Path, str] | None:
    """Returns the folder that a module of the user is imported from, and its file in that folder.

    Returns None for any other module, and for one without a file.
    """
    # A lazy module would be imported if it were asked for an attribute.
    attributes = getattr(module, "__dict__", {})
    file = attributes.get("__file__")
    if not isinstance(file, str):
        return None
    path = Path(os.path.abspath(file))
    if not is_user_file(str(path)) or not path.is_file():
        return None

    spec = attributes.get("__spec__")
    module_name = getattr(spec, "name", "__main__")
    depth = module_name.count(".") + 1
    if path.stem == "__init__":
        depth += 1
    name = Path(*path.parts[-depth:])
    folder = Path(*path.parts[:-depth])
    return folder, name.as_posix()
