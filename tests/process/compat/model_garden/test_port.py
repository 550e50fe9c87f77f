"""The port in docs/guides/porting.md: both programs and the command run, and go on with what the others began."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from trainer_kit.errors import ExitCode
from trainer_kit.testing import ForkServer

ROOT = Path(__file__).parents[4]
STEPS = "--params_override=trainer.train_steps={}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files of the page."""
    folder, page = tmp_path_factory.mktemp("port"), (ROOT / "docs" / "guides" / "porting.md").read_text()
    for name in ("rings.py", "before.py", "after.py"):
        text = page.split(f"<!-- port: {name} -->")[1].split("```python\n")[1].split("```")[0]
        (folder / name).write_text(text)
    return folder


def program(path: str, *flags: str) -> None:
    """Does what `python PATH FLAGS` does."""
    sys.argv, sys.path[0] = [path, *flags], "."
    runpy.run_path(path, run_name="__main__")


def test_a_run_of_their_program_is_resumed_by_all_programs(server: ForkServer, folder: Path) -> None:
    for steps, mode, command in (
        (200, "train_and_eval", (program, "before.py")),
        (400, "train_and_eval", (program, "after.py")),
        (600, "train_and_eval", ("train", "--import_module=rings.py")),
        (800, "train", (program, "before.py")),
    ):
        flags = ("--experiment=rings", f"--mode={mode}", "--model_dir=run", STEPS.format(steps))
        done = server.run(*command, *flags, folder=str(folder))
        assert done.code == 0, done.text
        assert (folder / "run" / f"ckpt-{steps}.index").exists()
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["kind"] == "train"] == [300, 400, 500, 600]  # ours went on at 200
    assert set(json.loads((folder / "run" / "best_ckpt" / "info.json").read_text())) == {
        "accuracy",
        "validation_loss",
        "best_ckpt_global_step",
    }


@pytest.mark.parametrize(
    ("override", "code", "told"),
    [
        ("trainer.best_checkpoint_eval_metric=acuracy", ExitCode.USAGE, "did you mean accuracy?"),
        ("trainer.trian_steps=4,task.model.widht=3", ExitCode.USAGE, "did you mean trainer.train_steps?"),
        ("", ExitCode.USAGE, "error: --experiment: no experiment is called 'ringz'; did you mean rings?"),
    ],
)
def test_a_mistake_ends_the_ported_program_with_its_exit_code(
    server: ForkServer, folder: Path, override: str, code: ExitCode, told: str
) -> None:
    flags = ("--mode=train_and_eval", "--model_dir=none", f"--experiment={'rings' if override else 'ringz'}")
    done = server.run(program, "after.py", *flags, f"--params_override={override}", folder=str(folder))
    assert done.code == code, done.text
    assert told in done.text and "Traceback" not in done.text
    assert not list((folder / "none").glob("best*"))


def test_a_bug_in_the_ported_program_stays_a_traceback(server: ForkServer, tmp_path: Path) -> None:
    lines = ("from trainer_kit.compat.model_garden import app", "app.run(lambda _: None.misspelt)")
    (tmp_path / "bug.py").write_text("\n".join(lines))
    done = server.run(program, "bug.py", folder=str(tmp_path))
    assert done.code == 1 and "AttributeError" in done.text and "Traceback" in done.text
