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

@register_experiment("{name}")
def recorded_elsewhere():
    return ExperimentConfig(task=TaskConfig())
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was started in the folder of its module, unlike the test."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "params.yaml").write_text("{}")
    # A name can be registered once in a process.
    name = f"recorded_{tmp_path.name}"
    command = ["train.py", "--import_module=recorded_task.py"]
    (folder / "manifest.json").write_text(json.dumps({"experiment": name, "command": command}))
    (tmp_path / "recorded_task.py").write_text(MODULE.format(name=name))
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
        UsageError, match=r"folder where the run was started\): no module is called 'recorded_else"
    ):
        read_run_config(run)


@pytest.mark.parametrize("modules", [(), ""])
def test_a_module_of_another_folder_is_asked_for(run: Path, modules: Any) -> None:
    with pytest.raises(UsageError) as raised:
        read_run_config(run, modules)

    assert str(raised.value) == (
        "import_modules (give it, or go to the folder where the run was started): there is no file"
        " recorded_task.py; here there are no Python files"
    )


def test_one_module_may_be_given_as_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_run_config(run, str(run.parent / "recorded_task.py")).runtime
    assert capsys.readouterr().out == ""


def test_a_module_that_the_run_names_is_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)

    read_run_config(run)

    assert capsys.readouterr().out == f"imports recorded_task.py, which {run} names\n"


@pytest.mark.parametrize(
    ("command", "params", "needed"),
    [
        (["--import_module", "recorded_task.py"], "{}", "recorded_task.py"),
        ([], "{}", "the module of the experiment 'recorded"),
        ([], "trainer: {trainer_class: 'recorded_task:Trainer'}", "recorded_task:Trainer"),
    ],
)
def test_nothing_is_imported_if_that_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], params: str, needed: str
) -> None:
    monkeypatch.chdir(run.parent)
    (run / "params.yaml").write_text(params)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["command"] = ["train.py", *command]
    if "trainer" in params:
        manifest["experiment"] = ""
    (run / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(UsageError, match=rf"^import_modules=False: {run} needs {needed}.*; name "):
        read_run_config(run, import_modules=False)

    assert "recorded_task" not in sys.modules
