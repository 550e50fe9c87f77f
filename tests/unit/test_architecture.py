"""The rules of the house, each applied to the checkout and to a sample that breaks it.

tests/unit/scripts/test_page_rules.py has the samples of the limits on pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from scripts import house, page_rules
from scripts.source_files import ROOT, SourceFile, find_undocumented, read_source_files
from trainer_kit.errors import DISTRIBUTION

HEAVY = {
    "tensorflow",
    "keras",
    "tf_keras",
    "orbit",
    "official",
    "numpy",
    "sklearn",
    "matplotlib",
    "pandas",
}


def create_source(text: str, module: str = "m") -> SourceFile:
    return SourceFile(module, text)


Modules = dict[str, str]  # text by name

BAD: list[tuple[house.Rule, Modules]] = [
    (house.lower_floors_only, {"trainer_kit.errors": "import trainer_kit.run.runner"}),
    (
        house.lower_floors_only,
        {"trainer_kit.config.schema.configclass": "from trainer_kit.process import signals"},
    ),
    (
        house.lower_floors_only,
        {"trainer_kit.run.runner": "def f():\n    from trainer_kit.cli import main"},
    ),
    (house.lower_floors_only, {"trainer_kit.files": "import_module('trainer_kit.run.runner')"}),
    (
        house.lower_floors_only,
        {"trainer_kit.files": "if TYPE_CHECKING:\n    import trainer_kit.training.trainer"},
    ),
    (house.lower_floors_only, {"trainer_kit.training.trainer": "from trainer_kit import Task"}),
    (house.lower_floors_only, {"trainer_kit.testing.tiny_task": "import trainer_kit.train"}),
    (house.lower_floors_only, {"trainer_kit.attic": "import os"}),
    (
        house.no_cycles,
        {"trainer_kit.a": "import trainer_kit.b", "trainer_kit.b": "from trainer_kit import a"},
    ),
    (
        house.no_cycles,
        {
            "trainer_kit.config.a": "import trainer_kit.config.b",
            "trainer_kit.config.b": "def f():\n    from trainer_kit.config import a",
        },
    ),
    (house.light_lower_floors, {"trainer_kit.process.signals": "import tensorflow as tf"}),
    (
        house.light_lower_floors,
        {"trainer_kit.config.sources.gin_source": "def f():\n    from keras import layers"},
    ),
    (house.restricted_libraries, {"trainer_kit.training.task": "import orbit"}),
    (house.restricted_libraries, {"trainer_kit.config.merge": "from gin import config"}),
    (house.restricted_libraries, {"trainer_kit.run.runner": "from absl import flags"}),
    (house.restricted_libraries, {"trainer_kit.training.task": "import official.core"}),
    (
        house.single_tf_keras_importer,
        {"trainer_kit.a": "import tf_keras", "trainer_kit.b": "import tf_keras"},
    ),
    (
        house.single_tf_keras_importer,
        {"trainer_kit.a": "import tf_keras\n" + "a = 1\n" * house.RECOGNISER_LINES},
    ),
    (
        house.experiments_use_public_names,
        {"trainer_kit.experiments.one.task": "from trainer_kit.experiments.two import task"},
    ),
    (
        house.experiments_use_public_names,
        {"trainer_kit.experiments.one": "import trainer_kit as tk\ntk.trainer.Trainer"},
    ),
    (
        house.experiments_use_public_names,
        {"trainer_kit.experiments.one": "import trainer_kit.run.runner"},
    ),
    (
        house.package_knows_no_experiment,
        {"trainer_kit.cli.list": "import trainer_kit.experiments.digits"},
    ),
    (
        house.private_names_in_their_modules,
        {"trainer_kit.run.a": "from tensorflow.python.eager import context"},
    ),
    (
        house.private_names_in_their_modules,
        {"trainer_kit.run.a": "from tensorflow.core.protobuf import config_pb2"},
    ),
    (
        house.private_names_in_their_modules,
        {"trainer_kit.run.a": "from keras.src.models.functional import Functional"},
    ),
    (house.private_names_in_their_modules, {"trainer_kit.run.a": "tensorflow.python.eager"}),
    (house.private_names_in_their_modules, {"trainer_kit.run.a": "tf.__internal__.tracking"}),
    (house.private_names_in_their_modules, {"trainer_kit.run.a": "gin.config._CONFIG"}),
    (house.private_names_in_their_modules, {"trainer_kit.run.a": "optimizer._learning_rate = 1"}),
    (house.private_names_in_their_modules, {"trainer_kit.run.a": "getattr(dataset, '_inputs')()"}),
    (
        house.private_names_in_their_modules,
        {"trainer_kit.run.a": "class A(orbit.Controller):\n    f = self._steps"},
    ),
    (house.private_names_in_their_modules, {"trainer_kit.run.a": "super()._sweep()"}),
    (house.private_names_in_their_modules, {"trainer_kit.run.a": "from trainer_kit.b import _own"}),
    (house.safe_yaml, {"m": "import yaml\nyaml.load(text)"}),
    (house.safe_yaml, {"m": "import yaml\nyaml.load(text, Loader=yaml.Loader)"}),
    (house.safe_yaml, {"m": "import yaml\nyaml.load(text, Mine)"}),
    (
        house.safe_yaml,
        {"m": "import yaml\nclass Mine(yaml.FullLoader): ...\nyaml.load(text, Mine)"},
    ),
    (house.safe_yaml, {"m": "import yaml\nyaml.unsafe_load(text)"}),
    (house.safe_yaml, {"m": "import yaml as y\ny.safe_load(text)"}),
    (house.safe_yaml, {"m": "from yaml import load"}),
    (house.names_say_what_is_inside, {"trainer_kit.utils": ""}),
    (house.names_say_what_is_inside, {"trainer_kit.experiments.one.helpers": ""}),
    (house.module_docstrings, {"m": "a = 1"}),
    (house.annotated_functions, {"m": "def f(a) -> None: ..."}),
    (house.annotated_functions, {"m": "def f(a: int): ..."}),
    (house.annotated_functions, {"m": "def f(*a, **b) -> None: ..."}),
    (house.annotated_functions, {"m": "class A:\n    def __init__(self, a): ..."}),
    (house.public_docstrings, {"m": '"""m"""\ndef f() -> None: ...'}),
]

GOOD: list[tuple[house.Rule, Modules]] = [
    (house.lower_floors_only, {"trainer_kit": "from trainer_kit.run.runner import run_experiment"}),
    (
        house.lower_floors_only,
        {"trainer_kit.cli.list": "from trainer_kit import __version__, files"},
    ),
    (
        house.lower_floors_only,
        {
            "trainer_kit.config.schema.experiment": (
                "from trainer_kit.config.schema.configclass import Config"
            )
        },
    ),
    (
        house.lower_floors_only,
        {
            "trainer_kit.training.task": (
                "from trainer_kit.inputs.sources.source_protocol import Source"
            )
        },
    ),
    (
        house.lower_floors_only,
        {"trainer_kit.run.runner": "from trainer_kit.run.controller import Controller"},
    ),
    (house.no_cycles, {"a": "import b", "b": "def f():\n    import a", "c": "import a, b"}),
    (house.restricted_libraries, {"trainer_kit.training.orbit_bases": "import orbit"}),
    (house.restricted_libraries, {"trainer_kit.run.runner": "from absl import logging"}),
    (house.single_tf_keras_importer, {"trainer_kit.a": "import tf_keras"}),
    (
        house.experiments_use_public_names,
        {
            "trainer_kit.experiments.one.task": (
                "import trainer_kit\nfrom trainer_kit.experiments.one import x"
            )
        },
    ),
    (
        house.experiments_use_public_names,
        {"trainer_kit.experiments.one": "from trainer_kit import Task, configclass"},
    ),
    (house.private_names_in_their_modules, {"trainer_kit.runtime.tensorflow_internals": "a._b"}),
    (house.private_names_in_their_modules, {"trainer_kit.compat.model_garden.actions.a": "a._b"}),
    (
        house.private_names_in_their_modules,
        {"trainer_kit.run.a": "os._exit(1)\na._replace(b=1)\na.__dict__"},
    ),
    (
        house.private_names_in_their_modules,
        {
            "m": (
                "class A:\n    def f(self, b):\n        self._a = 1\n        b._a\n        "
                "self._f()\n    _f = 1"
            )
        },
    ),
    (
        house.private_names_in_their_modules,
        {
            "b": "class B:\n    _x = 1",
            "a": "from b import B\nclass A(B):\n    y = self._x, super()._x",
        },
    ),
    (
        house.safe_yaml,
        {
            "m": (
                "import yaml\nyaml.safe_load(text)\nclass A(yaml.SafeLoader): ...\n"
                "yaml.load(text, Loader=A)"
            )
        },
    ),
    (
        house.annotated_functions,
        {"m": "class A:\n    def __init__(self, a: int): ...\n    def f(self) -> None: ..."},
    ),
]


def name_cases(cases: Iterable[tuple[house.Rule, Modules]]) -> list[Any]:
    return [
        pytest.param(rule, modules, id=f"{rule.__name__}-{next(iter(modules))}")
        for rule, modules in cases
    ]


def find_breaches(rule: house.Rule, modules: Modules) -> list[str]:
    return rule([create_source(text, module) for module, text in modules.items()])


@pytest.fixture(scope="module")
def checkout() -> list[SourceFile]:
    """All that the rules are for; parsed once."""
    return read_source_files("trainer_kit", "scripts")


@pytest.mark.parametrize(
    "rule", [*house.RULES, *page_rules.PAGE_RULES], ids=lambda rule: rule.__name__
)
def test_the_checkout_keeps_the_rule(rule: house.Rule, checkout: list[SourceFile]) -> None:
    violations = rule(checkout)
    assert not violations, "\n".join([str(rule.__doc__), *violations])


@pytest.mark.parametrize(("rule", "modules"), name_cases(BAD))
def test_a_sample_that_breaks_the_rule_is_found(rule: house.Rule, modules: Modules) -> None:
    assert find_breaches(rule, modules)


@pytest.mark.parametrize(("rule", "modules"), name_cases(GOOD))
def test_a_sample_that_keeps_the_rule_passes(rule: house.Rule, modules: Modules) -> None:
    assert find_breaches(rule, modules) == []


def test_every_rule_has_a_sample_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD} == set(house.RULES)


def test_only_public_names_need_a_docstring() -> None:
    text = """
def _f(): ...
@overload
def g(): ...
def g():
    'g'
    def h(): ...
class A:
    def i(self): ...
"""

    assert find_undocumented([create_source(text)]) == (4, ["m", "m.A", "m.A.i"])


def find_heavy_imports(folder: Path, *groups: Iterable[str]) -> list[set[str]]:
    """Returns the heavy libraries that a new process in `folder` has loaded after each group."""
    code = (
        f"import importlib, sys\nfor group in {[sorted(group) for group in groups]}:\n"
        "    [importlib.import_module(module) for module in group]\n    print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [HEAVY & set(line.split()) for line in done.stdout.splitlines()]


def test_front_door_flags_commands_and_unit_tests_import_little() -> None:
    """So do config, and experiments whose config is a module. Unit tests import no TensorFlow."""
    modules = [file.module for file in read_source_files("trainer_kit")]
    light = [m for m in modules if house.get_floor(m) in house.LIGHT_FLOORS]
    doors = [
        m
        for m in modules
        if m in ("trainer_kit", "trainer_kit.train") or house.get_floor(m) == "cli"
    ]
    experiments = [
        m.removesuffix(".config")
        for m in modules
        if re.fullmatch(r"trainer_kit\.experiments\.\w+\.config", m)
    ]
    unit = [file.module for file in read_source_files("tests/unit")]

    assert light
    assert doors
    assert experiments
    assert len(unit) > 50

    of_package, with_tests = find_heavy_imports(ROOT, [*light, *doors, *experiments], unit)
    assert of_package == set()
    assert "tensorflow" not in with_tests


def test_a_heavy_import_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "door.py").write_text("import room\n")
    (tmp_path / "room.py").write_text("import orbit\n")
    (tmp_path / "orbit.py").write_text("")

    assert find_heavy_imports(tmp_path, ["door"]) == [{"orbit"}]


def test_the_lock_covers_the_package_and_its_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION

    extras = project["optional-dependencies"]
    locked_extras = ("model-garden", "experiments", "dev", "docs")
    wanted = {
        *project["dependencies"],
        *(name for extra in locked_extras for name in extras[extra]),
    }
    lines = [
        *(ROOT / "requirements.in").read_text().split("\n"),
        *(ROOT / "constraints.txt").read_text().split("\n"),
    ]

    assert wanted <= set(lines)


def test_the_lock_holds_names_versions_and_hashes_only() -> None:
    entry = re.compile(
        r"[\w.-]+==[\w.+!-]+( ; [\w.'<>=! ()*-]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?"
    )
    strangers = [
        line
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if not entry.fullmatch(line)
    ]

    assert strangers == []


def test_what_imports_no_tensorflow_is_checked_strictly_by_mypy() -> None:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    strict = {
        m.removesuffix(".*")
        for section in overrides
        for m in section["module"]
        if section.get("warn_return_any")
    }
    floors = [f"{house.PACKAGE}.{floor}" for floor in house.LIGHT_FLOORS]

    assert [
        floor for floor in floors if not any(house.is_within(floor, module) for module in strict)
    ] == []


def test_names_of_tests_are_sentences_of_at_most_60_characters() -> None:
    # To parse all tests takes two seconds.
    definition = re.compile(r"^ *def (test_\w*)", re.MULTILINE)
    tests = [name for file in read_source_files("tests") for name in definition.findall(file.text)]

    assert len(tests) > 2000
    assert [name for name in tests if len(name) > 60] == []
