"""The config of a run is read from its folder, with the modules that its command imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.errors import UsageError
from trainer_kit.serving.run_config_loading import read_run_config

MODULE = """
import trainer_kit
from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig

@register_experiment("recorded_elsewhere")
def recorded_elsewhere():
    return ExperimentConfig(task=TaskConfig())
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was started in the folder of its module, unlike the test."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "params.yaml").write_text("{}")
    command = ["train.py", "--import_module=recorded_task.py"]
    (folder / "manifest.json").write_text(
        json.dumps({"experiment": "recorded_elsewhere", "command": command})
    )
    (tmp_path / "recorded_task.py").write_text(MODULE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delitem(sys.modules, "recorded_task", raising=False)

    return folder


def test_a_dotted_module_that_is_not_found_is_that_of_the_run(run: Path) -> None:
    command = ["train.py", "--import_module", "recorded_elsewhere.task"]
    (run / "manifest.json").write_text(
        json.dumps({"experiment": "recorded_elsewhere", "command": command})
    )

    with pytest.raises(
        UsageError,
        match=r"(?s)no module is called .*started with --import_module=recorded_elsewhere",
    ):
        read_run_config(run)


@pytest.mark.parametrize("modules", [(), ""])
def test_a_module_of_another_folder_is_asked_for(run: Path, modules: Any) -> None:
    with pytest.raises(UsageError) as raised:
        read_run_config(run, modules)

    text = str(raised.value)
    assert text.startswith(
        "import_modules: there is no file recorded_task.py; here there are no Python files\n"
    )
    assert "started with --import_module=recorded_task.py" in text


def test_one_module_may_be_given_as_a_text(run: Path) -> None:
    assert read_run_config(run, str(run.parent / "recorded_task.py")).runtime
