"""Where experiments come from, with real packages, files and entry points in temporary folders."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.builders import restore_registries
from trainer_kit.config import discovery
from trainer_kit.config.experiment_registry import experiments, get_experiment
from trainer_kit.errors import UsageError

Write = Callable[..., None]
Install = Callable[..., None]

_MODULE = """
from trainer_kit import ExperimentConfig, TrainerConfig, register_experiment

@register_experiment({name!r})
def factory():
    return ExperimentConfig(trainer=TrainerConfig(train_steps={steps}))
"""
_DOOR = """
from trainer_kit import ExperimentConfig, TrainerConfig
from trainer_kit.config.experiment_registry import experiments

asked = []

def find(name):
    asked.append(name)
    for own in ("{0}/theirs", "{0}/others"):
        if name in ("", own) and own not in experiments:
            trainer = TrainerConfig(train_steps=7)
            experiments.register(own)(lambda: ExperimentConfig(trainer=trainer))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what a test imports and registers is gone afterwards."""
    modules = set(sys.modules)
    path = list(sys.path)
    for module in [module for module in sys.modules if module.split(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()

    with restore_registries(experiments):
        yield tmp_path

    sys.path[:] = path
    for module in set(sys.modules) - modules:
        del sys.modules[module]
    for module in [module for module in sys.modules if module.split(".")[0] == "experiments"]:
        del sys.modules[module]


@pytest.fixture
def write(here: Path) -> Write:
    """Writes a module that registers an experiment, whose train_steps tell its place, or text."""

    def write(path: str, name: str = "", steps: int = 1, text: str = _MODULE) -> None:
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        (here / path).write_text(text.format(name, name=name, steps=steps))
        importlib.invalidate_caches()

    return write


@pytest.fixture
def install(here: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs what a wheel would: a distribution with an entry point, beside its module."""

    def install(
        module: str, point: str, target: str, group: str = discovery.EXPERIMENT_ENTRY_POINT_GROUP
    ) -> None:
        info = f"site/{module}_project-1.0.dist-info"
        write(
            f"{info}/METADATA",
            text=f"Metadata-Version: 2.1\nName: {module}-project\nVersion: 1.0\n",
        )
        write(f"{info}/entry_points.txt", text=f"[{group}]\n{point} = {target}\n")
        monkeypatch.syspath_prepend(here / "site")

    return install


def _read_steps(name: str) -> int:
    return get_experiment(name).trainer.train_steps


@pytest.mark.parametrize("place", ["experiments/{}.py", "experiments/{}/__init__.py"])
@pytest.mark.parametrize("full", ["{}", "{}/large", "{}/large/v2"])
def test_the_first_part_of_a_name_is_a_module_or_package_here(
    write: Write, name: str, place: str, full: str
) -> None:
    write(place.format(name), full.format(name), steps=3)

    discovery.import_experiment(full.format(name))

    assert _read_steps(full.format(name)) == 3


@pytest.mark.usefixtures("here")
def test_a_shipped_experiment_is_found_in_any_folder() -> None:
    discovery.import_experiment("digits")

    assert _read_steps("digits") == 1200


def test_an_own_experiment_goes_before_a_shipped_one(write: Write) -> None:
    write("experiments/circle.py", "circle", steps=3)

    discovery.import_experiment("circle")

    assert _read_steps("circle") == 3


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("{}.py", "{}.py"),
        ("{}_package/inner.py", "{}_package.inner"),
        ("sub/{}.py", "{here}/sub/{}.py"),
    ],
)
def test_a_module_can_be_named_by_its_file_or_its_dotted_name(
    here: Path, write: Write, name: str, path: str, module: str
) -> None:
    write(path.format(name), f"{name}/registered", steps=3)

    discovery.import_experiment(f"{name}/registered", [module.format(name, here=here)])

    assert _read_steps(f"{name}/registered") == 3


def test_a_file_may_be_named_twice_and_is_imported_once(write: Write, name: str) -> None:
    write(f"{name}.py", name)

    discovery.import_user_module(f"{name}.py")
    discovery.import_user_module(f"./{name}.py")
    discovery.import_user_module(name)

    assert _read_steps(name) == 1


def test_a_named_module_comes_before_the_working_directory(write: Write, name: str) -> None:
    write(f"experiments/{name}.py", name, steps=2)  # importing it too would be an error
    write(f"{name}_mine.py", name, steps=1)

    discovery.import_experiment(name, [f"{name}_mine"])

    assert _read_steps(name) == 1


def test_the_working_directory_comes_before_an_entry_point(
    write: Write, install: Install, name: str
) -> None:
    write(f"site/{name}_installed.py", name, steps=2)
    install(f"{name}_installed", name, f"{name}_installed")
    write(f"experiments/{name}.py", name, steps=1)

    discovery.import_experiment(name)

    assert _read_steps(name) == 1
    assert f"{name}_installed" not in sys.modules


@pytest.mark.parametrize("part", ["", "/large"])
def test_an_entry_point_of_the_name_or_its_first_part_is_loaded(
    write: Write, install: Install, name: str, part: str
) -> None:
    write(f"site/{name}_installed.py", f"{name}{part}", steps=4)
    install(f"{name}_installed", name, f"{name}_installed")
    install(f"{name}_other", f"{name}_other", f"{name}_which_does_not_exist")  # not touched

    discovery.import_experiment(f"{name}{part}")

    assert _read_steps(f"{name}{part}") == 4


def test_all_places_are_listed_together(
    here: Path, write: Write, install: Install, name: str
) -> None:
    assert discovery.list_local_experiments() == []

    write(f"experiments/{name}_module.py", f"{name}_module")
    write(f"experiments/{name}_package/__init__.py", f"{name}_package/a")
    write(f"{name}_file.py", f"{name}_file")
    write(f"site/{name}_installed.py", f"{name}_installed")
    install(f"{name}_installed", f"{name}_installed", f"{name}_installed")
    (here / "experiments" / "notes").mkdir()  # a folder that is no package
    names, broken = discovery.import_all_experiments([f"{name}_file.py"])

    assert broken == []

    expected = [f"{name}_file", f"{name}_installed", f"{name}_module", f"{name}_package/a"]
    assert [experiment for experiment in names if experiment.startswith(name)] == expected
    assert discovery.list_local_experiments() == [f"{name}_module", f"{name}_package"]


@pytest.mark.parametrize("right", ["local", "entry", "module/large", "door/theirs"])
def test_a_misspelt_experiment_names_near_ones_of_every_place(
    write: Write, install: Install, name: str, right: str
) -> None:
    write(f"experiments/{name}local.py", f"{name}local")
    write(f"experiments/{name}module.py", f"{name}module/large")
    write(f"site/{name}_installed.py", f"{name}entry")
    install(f"{name}_installed", f"{name}entry", f"{name}_installed")
    write(f"site/{name}_door.py", f"{name}door", text=_DOOR)
    install(f"{name}_door", name, f"{name}_door:find", discovery.FRAMEWORK_ENTRY_POINT_GROUP)

    with pytest.raises(
        UsageError,
        match=f"no experiment is called .*; did you mean .*{name}{right}.*--import_module$",
    ):
        discovery.import_experiment(f"{name}{right[:-1]}")


def test_a_misspelt_file_names_the_files_beside_it(write: Write, name: str) -> None:
    write(f"{name}_task.py", name)

    with pytest.raises(
        UsageError, match=rf"there is no file {name}_tusk\.py; did you mean {name}_task\.py\?"
    ):
        discovery.import_user_module(f"{name}_tusk.py")

    with pytest.raises(
        UsageError, match=r"there is no file nowhere/a\.py; there is no folder nowhere either"
    ):
        discovery.import_user_module("nowhere/a.py")


@pytest.mark.parametrize(
    "missing", ["no_such_module", "elsewhere.qqqq", "{}_package.iner", ".mine", ""]
)
def test_a_module_that_is_missing_is_a_message(write: Write, name: str, missing: str) -> None:
    write(f"{name}_package/inner.py", name)
    missing = missing.format(name)

    with pytest.raises(
        UsageError, match=f"no module is called '{missing}'; give a dotted name or the path"
    ):
        discovery.import_user_module(missing)


def test_a_file_named_like_a_module_that_is_imported_is_refused(write: Write) -> None:
    write("json.py", "never")

    with pytest.raises(
        UsageError, match=r"cannot be imported as 'json': another module has this name; rename"
    ):
        discovery.import_user_module("json.py")

    assert "never" not in experiments


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_file_that_failed_can_be_imported_when_it_is_mended(
    write: Write, name: str, error: type[BaseException]
) -> None:
    write(f"{name}.py", text=f"raise {error.__name__}\n")

    with pytest.raises(error):
        discovery.import_user_module(f"{name}.py")

    write(f"{name}.py", name, steps=5)

    discovery.import_user_module(f"{name}.py")

    assert _read_steps(name) == 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = 1\nb = (\n", r"cannot be .*:2: SyntaxError: '\(' was never closed"),
        ("if True:\na = 1\n", "cannot be .*:2: IndentationError: expected an indented block"),
        (
            "\nimport no_such_library\n",
            "cannot be .*:2: No module named 'no_such_library'; correct or install it",
        ),
        (
            "from json import no_such_name\n",
            "cannot be .*:1: cannot import name 'no_such_name' from 'json'",
        ),
        ("import sys\nsys.exit(0)\n", "ends the program .*:2: SystemExit: 0; guard"),
        (
            "def main():\n    raise SystemExit('no data')\nmain()\n",
            "ends the program .*:3: SystemExit: no data",
        ),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n",
            "ends the program .*:2: SystemExit: 2",
        ),
    ],
)
def test_a_failed_import_is_reported_with_line_and_reason(
    write: Write, name: str, text: str, reason: str
) -> None:
    write(f"experiments/{name}.py", text=text)
    write(f"{name}_mine.py", text=text)

    with pytest.raises(UsageError, match=rf"--experiment: experiments\.{name} {reason}") as error:
        discovery.import_experiment(name)

    assert error.value.__cause__ is not None

    for module in (f"{name}_mine", f"{name}_mine.py"):
        with pytest.raises(UsageError, match=rf"--import_module: {module} {reason}"):
            discovery.import_user_module(module)

    assert discovery.import_all_experiments()[1]


def test_the_line_of_an_import_that_fails_deeper_is_told(write: Write, name: str) -> None:
    write(f"{name}_inner.py", text="a = 1\n\nimport no_such_library\n")
    write(f"{name}_package/__init__.py", text=f"import {name}_inner\n")
    write(f"{name}_package/task.py", text="")

    with pytest.raises(
        UsageError,
        match=rf"{name}_package.task cannot be imported: .*{name}_inner\.py:3: No module",
    ):
        discovery.import_user_module(f"{name}_package.task")


def test_a_broken_module_does_not_hide_the_others(
    write: Write, install: Install, name: str
) -> None:
    write(f"experiments/{name}_sound.py", f"{name}_sound")
    write(f"experiments/{name}_broken.py", text="import no_such_library\n")
    write(f"site/{name}_installed.py", text="(\n")
    install(f"{name}_installed", f"{name}_point", f"{name}_installed")
    names, broken = discovery.import_all_experiments()

    assert [experiment for experiment in names if experiment.startswith(name)] == [f"{name}_sound"]

    first, second = map(str, broken)
    assert f"experiments.{name}_broken cannot be imported" in first
    assert f"{name}_installed (entry point {name}_point) cannot be imported" in second

    with pytest.raises(UsageError, match="no_such_library"):
        discovery.import_all_experiments([f"experiments.{name}_broken"])


def test_a_door_is_asked_for_what_is_nowhere_else(
    write: Write, install: Install, name: str
) -> None:
    write(f"site/{name}_door.py", name, text=_DOOR)
    install(f"{name}_door", name, f"{name}_door:find", discovery.FRAMEWORK_ENTRY_POINT_GROUP)
    write(f"experiments/{name}_local.py", f"{name}_local")

    discovery.import_experiment(f"{name}_local")

    assert f"{name}_door" not in sys.modules

    discovery.import_experiment(f"{name}/theirs")

    assert _read_steps(f"{name}/theirs") == 7
    assert sys.modules[f"{name}_door"].asked == [f"{name}/theirs"]
    assert f"{name}/others" not in discovery.import_all_experiments()[0]

    discovery.register_framework_experiments()

    assert f"{name}/others" in discovery.import_all_experiments()[0]


def test_a_broken_door_is_told_with_its_entry_point(
    write: Write, install: Install, name: str
) -> None:
    write(f"site/{name}_door.py", text="import no_such_library\n")
    install(f"{name}_door", name, f"{name}_door:find", discovery.FRAMEWORK_ENTRY_POINT_GROUP)

    with pytest.raises(
        UsageError, match=rf"{name}_door:find \(entry point {name}\) cannot be imported"
    ):
        discovery.import_experiment(f"{name}/theirs")
