"""The files in configs/ and the READMEs of experiments: what they name exists, and applies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer_kit.config.discovery import import_experiment
from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.config.merge import ResolvedConfig
from trainer_kit.config.modes import MODES
from trainer_kit.config.resolve import ConfigSources, list_resolved_values, resolve_config

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "trainer_kit" / "experiments"
CONFIGS = sorted(path for path in (ROOT / "configs").iterdir() if path.is_file())
EXPERIMENTS = sorted(path.parent.name for path in SHIPPED.glob("*/__init__.py"))
SOURCE_OF = {
    "--config_file": "config_files",
    "--gin_file": "gin_files",
    "--params_override": "params_overrides",
}
COMMAND = re.compile(r"python -m trainer_kit\.train((?:\s+--\w+=\S+)+)")


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments and files are looked up from the working directory."""
    monkeypatch.chdir(ROOT)


def _read_comment(path: Path) -> str:
    """Returns the comment that the file opens with, without its marks."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def _find_commands(text: str) -> list[list[tuple[str, str]]]:
    """Returns the flags of each training command in `text`, which may have continued lines."""
    commands = COMMAND.findall(text.replace("\\\n", " "))
    return [[tuple(flag.split("=", 1)) for flag in flags.split()] for flags in commands]  # type: ignore[misc]


def _resolve_flags(flags: list[tuple[str, str]]) -> ResolvedConfig:
    """Resolves the config of a command, which needs a mode, an experiment and a model_dir."""
    values = dict(flags)
    assert values.pop("--mode") in MODES
    assert values.pop("--model_dir").startswith("runs/")
    name = values.pop("--experiment")
    import_experiment(name)
    return resolve_config(
        name, ConfigSources(**{SOURCE_OF[flag]: (value,) for flag, value in values.items()})
    )


def test_configs_are_data_and_each_experiment_has_some() -> None:
    assert {path.suffix for path in CONFIGS} == {".yaml", ".gin"}
    assert {path.stem for path in CONFIGS} == set(EXPERIMENTS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_opens_with_purpose_command_result_and_cost(path: Path) -> None:
    labels = re.findall(
        r"^(Purpose|Command|Expected result|Cost): \S", _read_comment(path), re.MULTILINE
    )

    assert labels == ["Purpose", "Command", "Expected result", "Cost"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configs_command_applies_it_to_its_experiment(path: Path) -> None:
    (flags,) = _find_commands(_read_comment(path))
    flag = {".yaml": "--config_file", ".gin": "--gin_file"}[path.suffix]

    assert (flag, f"configs/{path.name}") in flags
    assert ("--experiment", path.stem) in flags

    resolved = _resolve_flags(flags)
    changed = list_resolved_values(resolved, get_experiment(path.stem))

    assert any(f"configs/{path.name}:" in origin for _, _, origin in changed)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_learning_rate_ends_with_the_training(path: Path) -> None:
    trainer = _resolve_flags(_find_commands(_read_comment(path))[0]).config.trainer
    sections = trainer.optimizers.values() or [trainer.optimizer_config]
    schedules = [section.learning_rate.get() for section in sections]

    assert all(
        getattr(schedule, "decay_steps", trainer.train_steps) == trainer.train_steps
        for schedule in schedules
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_commands_of_the_readme_resolve_and_have_their_cost(name: str) -> None:
    text = (SHIPPED / name / "README.md").read_text()
    commands = _find_commands(text)

    assert commands

    for flags in commands:
        assert ("--experiment", name) in flags
        _resolve_flags(flags)

    assert re.findall(r"^## (.*)", text, re.MULTILINE)[:3] == ["Command", "Expected result", "Cost"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_files_that_a_readme_names_are_there(name: str) -> None:
    text = (SHIPPED / name / "README.md").read_text()
    named = re.findall(r"\b(?:configs|trainer_kit/experiments)/[\w/]+\.\w+", text)

    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []
