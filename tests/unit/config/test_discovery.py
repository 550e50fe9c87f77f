"""Where experiments come from, with real packages, files and entry points in temporary folders."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_kit.config import discovery
from trainer_kit.config.experiments import experiments, get_experiment
from trainer_kit.errors import UsageError

_numbers = itertools.count()
_TEXT = """
from trainer_kit import ExperimentConfig, TrainerConfig, register_experiment

@register_experiment({name!r})
def factory():
    return ExperimentConfig(trainer=TrainerConfig(train_steps={steps}))
"""


@pytest.fixture
def name() -> str:
    """A name that no other test registers or imports."""
    return f"discovered{next(_numbers)}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what a test imports and registers is gone afterwards."""
    modules, path, registered = set(sys.modules), list(sys.path), dict(experiments._entries)
    for module in [module for module in sys.modules if module.split(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.path[:] = path
    for module in set(sys.modules) - modules:
        del sys.modules[module]
    for module in [module for module in sys.modules if module.split(".")[0] == "experiments"]:
        del sys.modules[module]
    experiments._entries.clear()
    experiments._entries.update(registered)


def _write(path: Path, name: str, steps: int = 1) -> None:
    """Writes a module that registers the experiment `name`, whose train_steps tell where it is from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_TEXT.format(name=name, steps=steps))
    importlib.invalidate_caches()


def _install(
    folder: Path,
    module: str,
    points: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    group: str = discovery.ENTRY_POINTS,
) -> None:
    """Installs what a wheel would: a distribution with entry points, beside its module."""
    info = folder / f"{module}_project-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}-project\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    monkeypatch.syspath_prepend(folder)


def _steps(name: str) -> int:
    return get_experiment(name).trainer.train_steps


@pytest.mark.parametrize("place", ["experiments/{}.py", "experiments/{}/__init__.py"])
@pytest.mark.parametrize("full", ["{}", "{}/large", "{}/large/v2"])
def test_the_first_part_of_a_name_is_a_module_or_package_here(here: Path, name: str, place: str, full: str) -> None:
    _write(here / place.format(name), full.format(name), steps=3)
    discovery.find_experiment(full.format(name))
    assert _steps(full.format(name)) == 3


def test_a_module_can_be_named_by_its_file_or_its_dotted_name(here: Path, name: str) -> None:
    _write(here / f"{name}.py", f"{name}/file")
    _write(here / f"{name}_package" / "inner.py", f"{name}/dotted")
    (here / "sub").mkdir()
    _write(here / "sub" / f"{name}_below.py", f"{name}/below")
    discovery.find_experiment(f"{name}/file", [f"{name}.py"])
    discovery.find_experiment(f"{name}/dotted", [f"{name}_package.inner"])
    discovery.find_experiment(f"{name}/below", [str(here / "sub" / f"{name}_below.py")])
    assert {f"{name}/file", f"{name}/dotted", f"{name}/below"} <= set(experiments.names())


def test_a_file_may_be_named_twice_and_is_imported_once(here: Path, name: str) -> None:
    _write(here / f"{name}.py", name)
    discovery.import_user_module(f"{name}.py")
    discovery.import_user_module(f"./{name}.py")
    discovery.import_user_module(name)
    assert _steps(name) == 1


def test_a_registered_experiment_is_found_first(here: Path, name: str) -> None:
    _write(here / "mine.py", name, steps=1)
    discovery.import_user_module("mine.py")
    _write(here / "experiments" / f"{name}.py", name, steps=2)  # importing it too would be an error
    discovery.find_experiment(name)
    assert _steps(name) == 1


def test_the_working_directory_is_taken_before_an_entry_point(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(here / "site" / f"{name}_installed.py", name, steps=2)
    _install(here / "site", f"{name}_installed", {name: f"{name}_installed"}, monkeypatch)
    _write(here / "experiments" / f"{name}.py", name, steps=1)
    discovery.find_experiment(name)
    assert _steps(name) == 1
    assert f"{name}_installed" not in sys.modules


def test_a_named_module_comes_before_the_working_directory(here: Path, name: str) -> None:
    _write(here / "experiments" / f"{name}.py", name, steps=2)
    _write(here / f"{name}_mine.py", name, steps=1)
    discovery.find_experiment(name, [f"{name}_mine"])
    assert _steps(name) == 1


@pytest.mark.parametrize("part", ["", "/large"])
def test_an_entry_point_of_the_name_or_its_first_part_is_loaded(
    here: Path, name: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(here / "site" / f"{name}_installed.py", f"{name}{part}", steps=4)
    points = {name: f"{name}_installed", f"{name}_other": f"{name}_which_does_not_exist"}
    _install(here / "site", f"{name}_installed", points, monkeypatch)
    discovery.find_experiment(f"{name}{part}")  # the other point is not touched
    assert _steps(f"{name}{part}") == 4


def test_all_places_are_listed_together(here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(here / "experiments" / f"{name}_module.py", f"{name}_module")
    _write(here / "experiments" / f"{name}_package" / "__init__.py", f"{name}_package/a")
    _write(here / f"{name}_file.py", f"{name}_file")
    _write(here / "site" / f"{name}_installed.py", f"{name}_installed")
    _install(here / "site", f"{name}_installed", {f"{name}_installed": f"{name}_installed"}, monkeypatch)
    (here / "experiments" / "notes").mkdir()  # a folder that is no package
    found, broken = discovery.find_all_experiments([f"{name}_file.py"])
    assert broken == []
    expected = [f"{name}_file", f"{name}_installed", f"{name}_module", f"{name}_package/a"]
    assert [one for one in found if one.startswith(name)] == expected
    assert discovery.local_experiments() == [f"{name}_module", f"{name}_package"]


def test_without_a_folder_of_experiments_there_are_no_local_ones(here: Path) -> None:
    assert discovery.local_experiments() == []


def test_a_misspelt_experiment_names_near_ones_of_every_place(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(here / "experiments" / f"{name}local.py", f"{name}local")
    _write(here / "site" / f"{name}_installed.py", f"{name}entry")
    _install(here / "site", f"{name}_installed", {f"{name}entry": f"{name}_installed"}, monkeypatch)
    for misspelt, right in ((f"{name}loca", f"{name}local"), (f"{name}entri", f"{name}entry")):
        with pytest.raises(UsageError, match=f"no experiment is called '{misspelt}'; did you mean .*{right}"):
            discovery.find_experiment(misspelt)


def test_a_module_with_another_name_is_a_miss_with_near_names(here: Path, name: str) -> None:
    _write(here / "experiments" / f"{name}.py", f"{name}/large")
    with pytest.raises(UsageError, match=f"no experiment is called '{name}/larg'; did you mean {name}/large"):
        discovery.find_experiment(f"{name}/larg")


def test_a_misspelt_file_names_the_files_beside_it(here: Path, name: str) -> None:
    _write(here / f"{name}_task.py", name)
    with pytest.raises(UsageError, match=rf"there is no file {name}_tusk\.py; did you mean {name}_task\.py\?"):
        discovery.import_user_module(f"{name}_tusk.py")
    with pytest.raises(UsageError, match=r"there is no file nowhere/a\.py; there is no folder nowhere either"):
        discovery.import_user_module("nowhere/a.py")


@pytest.mark.parametrize("misspelt", ["no_such_module", "no_such_package.inner"])
def test_a_misspelt_module_is_told_with_what_is_allowed(here: Path, misspelt: str) -> None:
    with pytest.raises(UsageError, match=f"no module is called '{misspelt}'; give a dotted name or the path"):
        discovery.import_user_module(misspelt)


def test_a_misspelt_module_names_the_nearest_here(here: Path, name: str) -> None:
    _write(here / f"{name}_task.py", name)
    _write(here / f"{name}_package" / "inner.py", name)
    for misspelt, right in ((f"{name}_tusk", f"{name}_task"), (f"{name}_packege.inner", f"{name}_package.inner"),
                            (f"{name}_package.iner", f"{name}_package.inner")):  # fmt: skip
        with pytest.raises(UsageError, match=f"no module is called '{misspelt}'.*did you mean .*{right}"):
            discovery.import_user_module(misspelt)


def test_a_file_named_like_a_module_that_is_imported_is_refused(here: Path) -> None:
    _write(here / "json.py", "never")
    with pytest.raises(UsageError, match=r"cannot be imported as 'json': another module has this name; rename"):
        discovery.import_user_module("json.py")
    assert "never" not in experiments


def test_errors_inside_a_users_module_are_raised_unchanged(here: Path, name: str) -> None:
    (here / f"{name}_a.py").write_text("import a_library_that_is_not_installed\n")
    (here / f"{name}_b.py").write_text("1 / 0\n")
    for module in (f"{name}_a", f"{name}_a.py"):
        with pytest.raises(UsageError, match=rf"{name}_a\.py:1: No module named 'a_library_that_is_not_installed'"):
            discovery.import_user_module(module)
    with pytest.raises(ZeroDivisionError):
        discovery.import_user_module(f"{name}_b.py")


def test_a_file_that_failed_can_be_imported_when_it_is_mended(here: Path, name: str) -> None:
    (here / f"{name}.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        discovery.import_user_module(f"{name}.py")
    _write(here / f"{name}.py", name, steps=5)
    discovery.import_user_module(f"{name}.py")
    assert _steps(name) == 5


@pytest.mark.parametrize(
    ("text", "reason", "cause"),
    [
        ("a = 1\nb = (\n", r":2: SyntaxError: '\(' was never closed", SyntaxError),
        ("if True:\na = 1\n", r":2: IndentationError: expected an indented block", IndentationError),
        ("\nimport no_such_library\n", r":2: No module named 'no_such_library'; correct or install it", ImportError),
        ("from json import no_such_name\n", r":1: cannot import name 'no_such_name' from 'json'", ImportError),
    ],
)
def test_a_failed_import_is_reported_with_line_and_reason(
    here: Path, name: str, text: str, reason: str, cause: type[Exception]
) -> None:
    (here / "experiments").mkdir()
    (here / "experiments" / f"{name}.py").write_text(text)
    (here / f"{name}_mine.py").write_text(text)
    found = []
    with pytest.raises(UsageError, match=rf"--experiment: experiments\.{name} cannot be .*{name}\.py{reason}") as error:
        discovery.find_experiment(name)
    found.append(error)
    for module in (f"{name}_mine", f"{name}_mine.py"):
        with pytest.raises(
            UsageError, match=rf"--import_module: {module} cannot be .*{name}_mine\.py{reason}"
        ) as error:
            discovery.import_user_module(module)
        found.append(error)
    assert all(isinstance(error.value.__cause__, cause) for error in found)


def test_the_line_of_an_import_that_fails_deeper_is_told(here: Path, name: str) -> None:
    (here / f"{name}_inner.py").write_text("a = 1\n\nimport no_such_library\n")
    (here / f"{name}_package").mkdir()
    (here / f"{name}_package" / "__init__.py").write_text(f"import {name}_inner\n")
    (here / f"{name}_package" / "task.py").write_text("")
    with pytest.raises(UsageError, match=rf"{name}_package.task cannot be imported: .*{name}_inner\.py:3: No module"):
        discovery.import_user_module(f"{name}_package.task")


def test_a_broken_module_does_not_hide_the_others(here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(here / "experiments" / f"{name}_sound.py", f"{name}_sound")
    (here / "experiments" / f"{name}_broken.py").write_text("import no_such_library\n")
    (here / "site").mkdir()
    (here / "site" / f"{name}_installed.py").write_text("(\n")
    _install(here / "site", f"{name}_installed", {f"{name}_point": f"{name}_installed"}, monkeypatch)
    found, broken = discovery.find_all_experiments()
    assert [one for one in found if one.startswith(name)] == [f"{name}_sound"]
    first, second = map(str, broken)
    assert f"experiments.{name}_broken cannot be imported" in first
    assert f"{name}_installed (entry point {name}_point) cannot be imported" in second
    with pytest.raises(UsageError, match="no_such_library"):
        discovery.find_all_experiments([f"experiments.{name}_broken"])


_DOOR = """
from trainer_kit import ExperimentConfig, TrainerConfig
from trainer_kit.config.experiments import experiments

asked = []

def find(name):
    asked.append(name)
    for own in ("{0}/theirs", "{0}/others"):
        if name in ("", own) and own not in experiments:
            experiments.register(own)(lambda: ExperimentConfig(trainer=TrainerConfig(train_steps=7)))
"""


def _door(here: Path, name: str, monkeypatch: pytest.MonkeyPatch, text: str = _DOOR) -> None:
    """Installs a door to another framework, which knows two experiments."""
    (here / "site").mkdir()
    (here / "site" / f"{name}_door.py").write_text(text.format(name))
    _install(here / "site", f"{name}_door", {name: f"{name}_door:find"}, monkeypatch, discovery.DOORS)


def test_a_door_is_asked_for_what_is_nowhere_else(here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _door(here, name, monkeypatch)
    _write(here / "experiments" / f"{name}_local.py", f"{name}_local")
    discovery.find_experiment(f"{name}_local")
    assert f"{name}_door" not in sys.modules
    discovery.find_experiment(f"{name}/theirs")
    assert _steps(f"{name}/theirs") == 7
    assert sys.modules[f"{name}_door"].asked == [f"{name}/theirs"]
    assert f"{name}/others" not in experiments


def test_all_that_doors_know_is_among_the_near_names_of_a_miss(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _door(here, name, monkeypatch)
    with pytest.raises(UsageError, match=f"no experiment is called '{name}/theris'; did you mean {name}/theirs"):
        discovery.find_experiment(f"{name}/theris")
    discovery.ask_doors()  # a second time
    assert f"{name}/others" in experiments


def test_experiments_of_doors_are_listed_only_when_asked_for(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _door(here, name, monkeypatch)
    assert f"{name}/theirs" not in discovery.find_all_experiments()[0]
    discovery.ask_doors()
    assert {f"{name}/theirs", f"{name}/others"} <= set(discovery.find_all_experiments()[0])


def test_a_broken_door_is_told_with_its_entry_point(here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _door(here, name, monkeypatch, text="import no_such_library\n")
    with pytest.raises(UsageError, match=rf"{name}_door:find \(entry point {name}\) cannot be imported"):
        discovery.find_experiment(f"{name}/theirs")


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import sys\nsys.exit(0)\n", "2: SystemExit: 0"),
        ("def main():\n    raise SystemExit('no data')\nmain()\n", "3: SystemExit: no data"),
        ("import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n", "2: SystemExit: 2"),
    ],
)
def test_a_module_that_ends_the_program_is_a_mistake(here: Path, name: str, text: str, how: str) -> None:
    (here / f"{name}.py").write_text(text)
    (here / "experiments").mkdir()
    (here / "experiments" / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    for module in (f"{name}.py", name):
        with pytest.raises(UsageError, match=f"ends the program when it is imported: .*{name}.py:{how}; guard"):
            discovery.import_user_module(module)
    with pytest.raises(UsageError, match=f"experiments.{name} ends the program .*:{how}"):
        discovery.find_experiment(name)
    assert discovery.find_all_experiments()[1]


def test_a_ctrl_c_while_a_module_is_imported_is_not_its_mistake(here: Path, name: str) -> None:
    (here / f"{name}.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        discovery.import_user_module(f"{name}.py")


def test_a_miss_says_how_to_name_the_users_module(here: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"[;?] (If not, )?name the module that registers it with --import_module$"):
        discovery.find_experiment("qqqqqq")
