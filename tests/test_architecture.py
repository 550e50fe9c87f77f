"""The rules of the house, each applied to the checkout and to a sample that breaks it."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from scripts import house
from scripts.source_files import ROOT, Source, documented, is_annotated, length, read_sources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEAVY = {"tensorflow", "keras", "tf_keras", "orbit", "official", "numpy", "sklearn", "matplotlib", "pandas"}

LONG_FUNCTION = "def run() -> None:\n" + "    print()\n" * 40
LONG_STORY = "def run_experiment() -> None:\n" + "    print()\n" * 80


def source(module: str, text: str = "") -> Source:
    return Source(module, textwrap.dedent(text))


# (rule, modules that break it). Modules that are separated by a comma are checked together.
BAD: list[tuple[house.Rule, list[Source]]] = [
    (house.lower_floors_only, [source("trainer_kit.errors", "import trainer_kit.runner")]),
    (house.lower_floors_only, [source("trainer_kit.config.base", "from trainer_kit.config import overrides")]),
    (house.lower_floors_only, [source("trainer_kit.trainer", "from trainer_kit.runner import run_experiment")]),
    (house.lower_floors_only, [source("trainer_kit.runner", "def f():\n    from trainer_kit.cli import main")]),
    (house.lower_floors_only, [source("trainer_kit.files", "import_module('trainer_kit.runner')")]),
    (house.lower_floors_only, [source("trainer_kit.files", "if TYPE_CHECKING:\n    import trainer_kit.trainer")]),
    (house.lower_floors_only, [source("trainer_kit.trainer", "from trainer_kit import Task")]),
    (house.lower_floors_only, [source("trainer_kit.trainer", "import trainer_kit")]),
    (house.lower_floors_only, [source("trainer_kit.inputs.arrays", "from trainer_kit.telemetry import writers")]),
    (house.lower_floors_only, [source("trainer_kit.optimizers", "from trainer_kit.tasks.base import Task")]),
    (house.lower_floors_only, [source("trainer_kit.serving.export", "from trainer_kit.trainer import Trainer")]),
    (house.lower_floors_only, [source("trainer_kit.train", "import trainer_kit.testing")]),
    (house.lower_floors_only, [source("trainer_kit.controller", "import trainer_kit.runner")]),
    (house.lower_floors_only, [source("trainer_kit.attic", "import os")]),
    (
        house.no_cycles,
        [
            source("trainer_kit.files", "import trainer_kit.errors"),
            source("trainer_kit.errors", "import trainer_kit.files"),
        ],
    ),
    (house.light_lower_floors, [source("trainer_kit.schedules", "import tensorflow as tf")]),
    (house.light_lower_floors, [source("trainer_kit.config.sources", "def f():\n    from keras import layers")]),
    (house.light_lower_floors, [source("trainer_kit.experiment", "import orbit")]),
    (house.light_lower_floors, [source("trainer_kit.files", "import numpy as np")]),
    (house.libraries_in_their_rooms, [source("trainer_kit.tasks.base", "import orbit")]),
    (house.libraries_in_their_rooms, [source("trainer_kit.config.overrides", "from gin import config")]),
    (house.libraries_in_their_rooms, [source("trainer_kit.runner", "from absl import flags")]),
    (house.libraries_in_their_rooms, [source("trainer_kit.cli.main", "import absl.flags")]),
    (house.libraries_in_their_rooms, [source("trainer_kit.tasks.base", "import official.core")]),
    (
        house.one_tf_keras_recogniser,
        [source("trainer_kit.a", "import tf_keras"), source("trainer_kit.b", "import tf_keras")],
    ),
    (
        house.one_tf_keras_recogniser,
        [source("trainer_kit.a", "import tf_keras\n" + "a = 1\n" * house.RECOGNISER_LINES)],
    ),
    (house.experiments_use_public_names, [source("experiments.one.task", "from experiments.two import task")]),
    (
        house.experiments_use_public_names,
        [source("experiments.one", "from trainer_kit.config.schema import DataConfig")],
    ),
    (house.experiments_use_public_names, [source("experiments.one", "import trainer_kit as tk\ntk.trainer.Trainer")]),
    (house.experiments_use_public_names, [source("experiments.one", "import trainer_kit.runner")]),
    (house.package_knows_no_experiment, [source("trainer_kit.cli.list", "import experiments.digits")]),
    (house.safe_yaml, [source("m", "import yaml\nyaml.load(text)")]),
    (house.safe_yaml, [source("m", "import yaml\nyaml.load(text, Loader=yaml.Loader)")]),
    (house.safe_yaml, [source("m", "import yaml\nyaml.load(text, Mine)")]),
    (house.safe_yaml, [source("m", "import yaml\nclass Mine(yaml.FullLoader): ...\nyaml.load(text, Mine)")]),
    (house.safe_yaml, [source("m", "import yaml\nyaml.unsafe_load(text)")]),
    (house.safe_yaml, [source("m", "import yaml\nyaml.full_load(text)")]),
    (house.safe_yaml, [source("m", "from yaml import load")]),
    (house.names_say_what_is_inside, [source("trainer_kit.utils")]),
    (house.names_say_what_is_inside, [source("experiments.one.helpers")]),
    (house.module_docstrings, [source("m", "a = 1")]),
    (house.small_files, [source("m", "a = 1\n" * 301)]),
    (house.small_functions, [source("m", LONG_FUNCTION)]),
    (
        house.small_functions,
        [source("m", textwrap.indent(LONG_STORY, "    ").replace("    def", "class A:\n    def", 1))],
    ),
    (house.annotated_functions, [source("m", "def f(a) -> None: ...")]),
    (house.annotated_functions, [source("m", "def f(a: int): ...")]),
    (house.annotated_functions, [source("m", "def f(*a, **b) -> None: ...")]),
    (house.annotated_functions, [source("m", "class A:\n    def __init__(self, a): ...")]),
    (house.annotated_functions, [source("m", "def f() -> None:\n    def g(): ...")]),
    (house.public_docstrings, [source("m", '"""m"""\ndef f() -> None: ...')]),
]

GOOD: list[tuple[house.Rule, list[Source]]] = [
    (house.lower_floors_only, [source("trainer_kit", "from trainer_kit.runner import run_experiment")]),
    (house.lower_floors_only, [source("trainer_kit.cli.list", "from trainer_kit import __version__, files")]),
    (house.lower_floors_only, [source("trainer_kit.config.schema", "from trainer_kit.config.base import Config")]),
    (house.lower_floors_only, [source("trainer_kit.tasks.base", "from trainer_kit.inputs.source import Source")]),
    (house.lower_floors_only, [source("trainer_kit.runner", "from trainer_kit.controller import Controller")]),
    (house.no_cycles, [source("a", "import b"), source("b", "def f():\n    import a"), source("c", "import a, b")]),
    (house.libraries_in_their_rooms, [source("trainer_kit.callbacks.base", "import orbit")]),
    (house.libraries_in_their_rooms, [source("trainer_kit.runner", "from absl import logging")]),
    (
        house.experiments_use_public_names,
        [source("experiments.one.task", "import trainer_kit\nfrom experiments.one import x")],
    ),
    (house.experiments_use_public_names, [source("experiments.one", "from trainer_kit import Task, configclass")]),
    (
        house.safe_yaml,
        [source("m", "import yaml\nclass A(yaml.SafeLoader): ...\nyaml.load(text, Loader=A)\nyaml.safe_load(text)")],
    ),
    (house.small_functions, [source("m", LONG_STORY.replace("    print()\n", "", 1))]),
    (
        house.annotated_functions,
        [source("m", "class A:\n    def __init__(self, a: int): ...\n    def f(self) -> None: ...")],
    ),
]


def named(cases: Iterable[tuple[house.Rule, list[Source]]]) -> list[Any]:
    return [pytest.param(rule, sources, id=f"{rule.__name__}-{sources[0].module}") for rule, sources in cases]


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_checkout_keeps_the_rule(rule: house.Rule) -> None:
    breaches = rule(read_sources("trainer_kit", "experiments", "scripts"))
    assert not breaches, "\n".join([str(rule.__doc__), *breaches])


@pytest.mark.parametrize(("rule", "sources"), named(BAD))
def test_a_sample_that_breaks_the_rule_is_found(rule: house.Rule, sources: list[Source]) -> None:
    assert rule(sources)


@pytest.mark.parametrize(("rule", "sources"), named(GOOD))
def test_a_sample_that_keeps_the_rule_passes(rule: house.Rule, sources: list[Source]) -> None:
    assert rule(sources) == []


def test_every_rule_has_a_sample_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD} == set(house.RULES)


def test_the_checkout_is_read_at_all() -> None:
    modules = {source.module for source in read_sources("trainer_kit")}
    assert {"trainer_kit", "trainer_kit.errors", "trainer_kit.config.schema"} <= modules


def test_length_leaves_the_docstring_out_and_code_lines_count_code_only() -> None:
    one = source("m", '"""m\n\n"""\n\n# note\ndef f() -> str:\n    """f"""\n    return """\n    a"""\n')
    assert length(one.functions[0]) == 3
    assert one.code_lines == 3


def test_private_names_overloads_and_inner_functions_need_no_docstring() -> None:
    text = '"""m"""\ndef _f(): ...\n@overload\ndef g(): ...\ndef g():\n    """g"""\n    def h(): ...\nclass A:\n    def i(self): ...\n'
    assert documented([source("m", text)]) == (4, ["m.A", "m.A.i"])


def test_an_annotated_function_may_leave_out_self_only() -> None:
    one = source("m", "class A:\n    def f(self, a: int, /, b: int, *c: int, d: int = 1, **e: int) -> None: ...")
    assert is_annotated(one.functions[0])


def heavy_imports(modules: Iterable[str], folder: Path) -> set[str]:
    """Returns the heavy libraries that a fresh process in `folder` has loaded after importing `modules`."""
    code = f"import sys, importlib; [importlib.import_module(m) for m in {sorted(modules)}]; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()
    return HEAVY & set(loaded)


def test_the_front_door_flags_config_and_commands_import_nothing_heavy() -> None:
    modules = [one.module for one in read_sources("trainer_kit")]
    light = [m for m in modules if house.floor_of(m) in house.SHARED_FLOORS]
    doors = [m for m in modules if m in ("trainer_kit", "trainer_kit.train") or house.room_of(m) == "cli"]
    assert light and doors
    assert heavy_imports([*light, *doors], ROOT) == set()


def test_registering_the_shipped_experiments_imports_nothing_heavy() -> None:
    names = {one.module for one in read_sources("experiments") if one.module.count(".") == 1}
    assert heavy_imports(names, ROOT) == set()


def test_a_heavy_import_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "door.py").write_text("import room\n")
    (tmp_path / "room.py").write_text("import orbit\n")
    (tmp_path / "orbit.py").write_text("")
    assert heavy_imports(["door"], tmp_path) == {"orbit"}


def test_the_lock_is_made_from_what_the_package_and_its_dev_extra_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["dev"]}
    lines = [*(ROOT / "requirements.in").read_text().split("\n"), *(ROOT / "constraints.txt").read_text().split("\n")]
    assert wanted <= set(lines)


def test_the_lock_holds_names_versions_and_hashes_only() -> None:
    entry = re.compile(r"[\w.-]+==[\w.+!-]+( ; [\w.'<>= ()*-]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    strangers = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not entry.fullmatch(line)]
    assert strangers == []
