"""`trainer-kit show`: every value with its origin, as a user runs it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from trainer_kit.config.fields import flatten_values
from trainer_kit.testing import tiny_experiment

ROOT = Path(__file__).parents[3]
Command = Callable[..., subprocess.CompletedProcess[str]]


def _rows(text: str) -> dict[str, tuple[str, str]]:
    """Path -> (value, origin) of each line."""
    rows = {}
    for line in text.splitlines():
        setting, _, origin = line.rpartition("  # ")
        path, _, value = setting.partition(" = ")
        rows[path] = (value.strip(), origin)
    return rows


def test_every_value_of_an_experiment_is_shown(trainer_kit: Command) -> None:
    done = trainer_kit("show", "digits", folder=ROOT)
    assert (done.returncode, done.stderr) == (0, "")

    rows = _rows(done.stdout)
    assert int(rows["trainer.train_steps"][0]) > 0
    assert "task.model.width" in rows  # the task's own section too
    assert rows["trainer.best_checkpoint_eval_metric"] == ("'accuracy'", "experiment")
    assert rows["trainer.max_to_keep"] == ("5", "default")
    # Declared as a whole number.
    assert rows["trainer.continuous_eval_timeout"] == ("3600.0", "default")
    assert rows["task.validation_data.drop_remainder"] == ("False", "default")  # that of TaskConfig
    assert {origin for _, origin in rows.values()} == {"default", "experiment"}

    general = [
        path
        for path in flatten_values(tiny_experiment())
        if path.startswith(("runtime.", "task.train_data."))
    ]
    assert set(general) <= set(rows)


def test_diff_shows_only_what_differs_from_the_defaults(trainer_kit: Command, here: Path) -> None:
    before = sorted(here.rglob("*"))
    arguments = ("show", "mine/small", "--import_module=mine.py", "--diff")

    # The default of max_to_keep is 5.
    overrides = "--params_override=trainer.train_steps=7,trainer.max_to_keep=5"
    done = trainer_kit(*arguments, overrides)
    assert done.stdout == "trainer.train_steps = 7  # --params_override\n"

    done = trainer_kit(*arguments, "--gin_params=mine.small.steps = 8")
    assert done.stdout == "trainer.train_steps = 8  # mine/small.steps of --gin_params\n"

    done = trainer_kit(*arguments)
    assert done.stdout == "every value is the experiment's default\n"
    assert sorted(here.rglob("*")) == before


def test_a_value_that_is_named_is_explained(trainer_kit: Command) -> None:
    done = trainer_kit("show", "mine/small", "trainer.max_to_keep", "--import_module=mine.py")
    assert done.stdout.splitlines() == [
        "trainer.max_to_keep = 5  # default",
        "    How many of the newest checkpoints are kept.",
        "    It takes a whole number of at least 1; the default here is 5.",
    ]


def test_the_default_that_is_shown_is_that_of_the_experiment(trainer_kit: Command) -> None:
    path = "task.validation_data.drop_remainder"
    done = trainer_kit("show", "digits", path, f"--params_override={path}=true", folder=ROOT)

    assert done.stdout.splitlines()[0] == f"{path} = True  # --params_override"
    assert done.stdout.endswith("the default here is false.\n")


def test_a_section_that_is_named_is_explained_value_by_value(trainer_kit: Command) -> None:
    done = trainer_kit("show", "mine/small", "--import_module=mine.py", "trainer.continuous_eval")
    values = [
        line.partition(" ")[0] for line in done.stdout.splitlines() if not line.startswith(" ")
    ]
    inside = ("policy", "validation_sets", "max_wait_checkpoints")

    assert values == [f"trainer.continuous_eval.{name}" for name in inside]


def test_a_path_that_leads_nowhere_is_a_message_with_near_names(trainer_kit: Command) -> None:
    done = trainer_kit("show", "mine/small", "trainer.max_to_kep", "--import_module=mine.py")
    assert (done.returncode, done.stdout) == (2, "")

    message = "trainer.max_to_kep: there is no such value; did you mean trainer.max_to_keep"
    assert message in done.stderr


def test_a_terminal_shows_a_sentence_below_each_value(here: Path) -> None:
    arguments = ["show", "mine/small", "--import_module=mine.py", "--diff"]
    override = "--params_override=trainer.max_to_keep=9"
    command = [sys.executable, "-m", "trainer_kit", *arguments, override]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"}

    master, slave = pty.openpty()
    done = subprocess.run(command, cwd=here, env=environment, stdout=slave, timeout=120)
    os.close(slave)
    lines = os.read(master, 10_000).decode().splitlines()
    os.close(master)

    assert done.returncode == 0
    assert lines[0].startswith("trainer.max_to_keep = 9")
    assert "How many of the newest checkpoints" in lines[1]
