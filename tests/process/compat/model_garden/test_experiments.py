"""Model Garden's experiments among ours: names, configs, and that nothing is imported too early."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from official.core import exp_factory
from official.core.config_definitions import ExperimentConfig as TheirExperimentConfig

from tests.builders import run_program
from trainer_kit.compat.model_garden.config_classes import build_original, mirror
from trainer_kit.compat.model_garden.experiments import EXPERIMENTS, PREFIX, find
from trainer_kit.config.discovery import import_experiment
from trainer_kit.config.experiment_registry import experiments, get_experiment
from trainer_kit.config.experiment_registry import lookup_task_class as task_class_of
from trainer_kit.config.resolve import ConfigSources, list_resolved_values, resolve_config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.serialize import to_yaml
from trainer_kit.errors import UsageError

ROOT = Path(__file__).parents[4]
OF_TESTS = "tests_of_trainer_kit"


@pytest.fixture(autouse=True, scope="module")
def all_experiments_of_theirs() -> None:
    """Registers them. The import takes two seconds, which the workers without this file save."""
    importlib.import_module("official.common.registry_imports")


def _collect_names(entries: dict[str, object], path: str = "") -> set[str]:
    """What Model Garden has registered; other tests in this process may register more."""
    names = set()
    for name, entry in entries.items():
        if isinstance(entry, dict):
            names |= _collect_names(entry, f"{path}{name}/")
        elif entry.__module__.startswith("official."):
            names.add(path + name)
    return names


def test_the_names_are_those_of_their_registry() -> None:
    assert set(EXPERIMENTS) == _collect_names(exp_factory._REGISTERED_CONFIGS)
    assert len(EXPERIMENTS) == 41


def test_the_page_lists_every_experiment_once() -> None:
    text = (ROOT / "docs" / "model_garden_experiments.md").read_text()
    rows = re.findall(r"^\| .* \| (`.*) \|$", text, re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", ", ".join(rows))) == sorted(EXPERIMENTS)


@pytest.mark.parametrize("name", ["mock", "bert/squad"])
def test_a_name_is_known_with_and_without_the_prefix(name: str) -> None:
    for full in (name, PREFIX + name):
        import_experiment(full)
        assert isinstance(get_experiment(full), ExperimentConfig)


def test_a_bare_name_is_registered_only_when_it_was_asked_for() -> None:
    find("")
    assert f"{PREFIX}revnet_imagenet" in experiments
    assert "revnet_imagenet" not in experiments


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet_imagenett", "tfm/resnet_imagenet"),
        ("TFM/mock", "tfm/mock"),
        ("bert_squad", "tfm/bert/squad"),
    ],
)
def test_a_near_name_is_told(name: str, near: str) -> None:
    message = f"no experiment is called '{name}'; did you mean .*{near}"
    with pytest.raises(UsageError, match=message):
        import_experiment(name)


def test_model_garden_is_imported_late_and_missed_in_one_line() -> None:
    ended = run_program(
        "import sys; from trainer_kit.cli.main import main\n"
        "main(['list', '--all']); main(['show', 'tfm/mok'])\n"  # neither a list nor a typo needs it
        "heavy = {'official', 'tensorflow', 'tf_keras', 'orbit'}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & heavy))\n"
        "sys.modules['official'] = None; sys.stderr = sys.stdout\n"
        "print(main(['show', 'tfm/mock']))",
        cwd=ROOT,
    )

    *list_lines, modules, error, code = ended.stdout.splitlines()
    assert any("tfm/wmt_transformer/large" in line for line in list_lines)
    assert modules == "[]"
    message = "tfm/mock is an experiment of TF Model Garden, which cannot be imported"
    assert error.startswith(f"error: experiment: {message}")
    assert error.endswith(": pip install 'tf-trainer-kit[model-garden]'")
    assert code == "2"


def test_experiments_that_a_user_registers_with_them_are_known() -> None:
    if OF_TESTS not in exp_factory._REGISTERED_CONFIGS:
        exp_factory.register_config_factory(OF_TESTS)(TheirExperimentConfig)
    find(PREFIX + OF_TESTS)
    assert PREFIX + OF_TESTS in experiments


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_config_resolves_is_shown_and_comes_back_as_it_was(name: str) -> None:
    theirs = exp_factory.get_exp_config(name)
    assert build_original(mirror(theirs)).as_dict() == theirs.as_dict()
    import_experiment(PREFIX + name)
    resolved = resolve_config(PREFIX + name, ConfigSources())
    ours = resolved.config
    assert build_original(ours.task).as_dict() == theirs.task.as_dict()
    optimizer_config = build_original(ours.trainer.optimizer_config)
    assert optimizer_config.as_dict() == theirs.trainer.optimizer_config.as_dict()

    values = list_resolved_values(resolved)
    assert len(values) > 100
    assert {origin for _, _, origin in values} == {"default"}
    assert task_class_of(ours.task).__name__ == "create_task"
    assert to_yaml(ours)
