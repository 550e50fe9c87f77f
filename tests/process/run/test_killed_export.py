"""A run that is killed in the export at its end, and started again, has a whole export."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import tensorflow as tf

from tests.fork_server import ForkServer
from tests.process.end_to_end.killed_experiment import train_and_die_at
from trainer_kit.testing.tiny_task import FEATURES

EXPERIMENT = "tests.process.end_to_end.killed_experiment"


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed four times in its export, and then came to its end."""
    run = tmp_path_factory.mktemp("run")
    arguments = (
        f"--import_module={EXPERIMENT}",
        "--experiment=killed",
        "--mode=train_and_eval",
        f"--model_dir={run}",
        "--params_override=trainer.train_steps=15,trainer.export=[saved_model]",
    )
    ends = []
    with ForkServer([EXPERIMENT]) as server:
        # When the temporary folder is there, and when the SavedModel is written and compared.
        for pattern in (".*.tmp", ".*.tmp/new/*/saved_model.pb"):
            child = server.start("train", *arguments)
            while child.alive and not any((run / "export").glob(pattern)):
                time.sleep(0.005)
            child.kill()
            ends.append(child.wait())

        # Before README.md and before export.json get their names.
        for occurrence in (1, 2):
            points = f"{run}.points"
            end = server.run(train_and_die_at, "file.rename", occurrence, points, *arguments)
            ends.append(end)

        for end in ends:
            assert end.code == -signal.SIGKILL, end.text
            assert "finished at step 15" in end.text
            assert "exporting" in end.text
            assert "exported" not in end.text
        last = server.run("train", *arguments)
        assert last.code == 0, last.text
    return run


def test_an_export_is_whole_after_kills_and_a_restart(killed_run: Path) -> None:
    folder = killed_run / "export" / "15"

    assert json.loads((folder / "export.json").read_text())["step"] == 15
    assert "# killed, step 15" in (folder / "README.md").read_text()
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    assert signature(inputs=tf.zeros([2, FEATURES]))["outputs"].shape == (2, 3)


def test_no_temporary_folder_of_a_killed_export_is_left(killed_run: Path) -> None:
    assert os.listdir(killed_run / "export") == ["15"]
