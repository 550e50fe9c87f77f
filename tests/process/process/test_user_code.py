"""What the manifest records of the user's code."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trainer_kit.process import user_code
from trainer_kit.process.user_code import describe_code, describe_code_changes, read_git_state


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.com"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of a task, in a package beside the working directory."""
    folder = tmp_path / "source" / "recorded_shapes"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "layers.py").write_text("WIDTH = 4\n")
    task = "from recorded_shapes import layers\n\n\nclass Task:\n    width = layers.WIDTH\n"
    (folder / "task.py").write_text(task)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(str(tmp_path / "source"))

    module = importlib.import_module("recorded_shapes.task")
    yield module
    for name in [name for name in sys.modules if name.startswith("recorded_shapes")]:
        del sys.modules[name]


def test_the_modules_of_the_user_are_recorded_by_name(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "first.py"
    program.write_text("from recorded_shapes import task\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)

    modules = describe_code(package.Task)["modules"]

    prefix = "recorded_shapes"
    names = [name for name in modules if name.startswith(prefix)]
    assert names == [f"{prefix}/__init__.py", f"{prefix}/layers.py", f"{prefix}/task.py"]
    assert "first.py" in modules
    assert not modules.keys() & {
        "__main__.py",
        "numpy/__init__.py",
        "trainer_kit/process/user_code.py",
    }

    monkeypatch.chdir(tmp_path / "source" / "recorded_shapes")
    assert describe_code(package.Task)["modules"] == modules


def test_the_program_of_a_command_is_not_recorded(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "trainer-kit"
    program.write_text("#!/home/ada/environment/bin/python\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)

    assert "trainer-kit" not in describe_code(package.Task)["modules"]


def test_a_lazy_module_is_recorded_and_stays_lazy(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "optional.py"
    file.write_text("raise ImportError('it is not installed')\n")
    spec = importlib.util.spec_from_file_location("recorded_shapes_optional", file)
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setitem(sys.modules, spec.name, module)
    # A module that must not be imported.
    monkeypatch.setitem(sys.modules, "forbidden", None)  # type: ignore[arg-type]

    assert "optional.py" in describe_code(package.Task)["modules"]


def test_git_is_asked_in_the_folder_of_the_task(package: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    _git(folder, "init")
    _git(folder, "add", ".")
    _git(folder, "commit", "-m", "Add the task")

    commit = _git(folder, "rev-parse", "HEAD")
    assert describe_code(package.Task)["git"] == {"commit": commit, "dirty": False}
    assert describe_code(int)["git"] == {}


def test_a_changed_module_is_named(package: ModuleType, tmp_path: Path) -> None:
    before = describe_code(package.Task)
    assert describe_code_changes(before, describe_code(package.Task)) == []

    (tmp_path / "source" / "recorded_shapes" / "layers.py").write_text("WIDTH = 5\n")
    now = describe_code(package.Task)

    assert describe_code_changes(before, now) == [
        "code: recorded_shapes/layers.py changed since the last start of this run"
    ]


def test_modules_that_only_one_start_has_are_no_change(package: ModuleType) -> None:
    now = describe_code(package.Task)
    other_modules = {"recorded_shapes.plots": "0123456789abcdef"}

    assert describe_code_changes({"modules": other_modules}, now) == []
    assert describe_code_changes({}, now) == []


def test_git_tells_the_commit_and_whether_files_changed(tmp_path: Path) -> None:
    assert read_git_state(tmp_path) == {}
    _git(tmp_path, "init")
    assert read_git_state(tmp_path) == {}

    (tmp_path / "task.py").write_text("WIDTH = 4\n")
    _git(tmp_path, "add", "task.py")
    _git(tmp_path, "commit", "-m", "Add the task")
    (tmp_path / "notes.txt").write_text("git does not track this file")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert read_git_state(tmp_path) == {"commit": commit, "dirty": False}

    (tmp_path / "task.py").write_text("WIDTH = 5\n")
    assert read_git_state(tmp_path) == {"commit": commit, "dirty": True}


def test_a_slow_or_missing_git_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_GIT_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_git_state(tmp_path) == {}

    (tmp_path / "git").write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    (tmp_path / "git").chmod(0o755)
    assert read_git_state(tmp_path) == {}


def test_a_shipped_experiment_is_compared_with_that_of_the_user() -> None:
    own = {"modules": {"experiments/circle.py": "0f"}}
    shipped = {"modules": {"trainer_kit/experiments/circle.py": "a1"}}

    (from_own,) = describe_code_changes(own, shipped)
    (from_shipped,) = describe_code_changes(shipped, own)

    assert from_own.startswith("code: trainer_kit/experiments/circle.py changed")
    assert from_shipped.startswith("code: experiments/circle.py changed")
    moved = {"modules": {"trainer_kit/experiments/circle.py": "0f"}}
    assert describe_code_changes(own, moved) == []
