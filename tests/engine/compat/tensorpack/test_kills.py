"""Programs that are killed and started again end with the bits of those that were not."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.compat.tensorpack.killed_programs import run_program
from tests.fork_server import ForkServer
from trainer_kit.errors import ExitCode

KILL = -signal.SIGKILL


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["trainer_kit.compat.tensorpack"]) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("convnet", {"save:2": KILL, "KILL@step:8": KILL, "KILL@inference:15": KILL}),
        (
            "gan",
            {"KILL@step:3": KILL, "TERM@step:11": ExitCode.PREEMPTED, "KILL@step:20": KILL},
        ),
    ],
    ids=["convnet", "gan"],
)
def test_a_killed_program_ends_with_the_same_bits(
    server: ForkServer, tmp_path: Path, name: str, codes: dict[str, int]
) -> None:
    whole = str(tmp_path / "whole")
    killed = str(tmp_path / "killed")

    whole_end = server.run(run_program, name, whole)
    killed_codes = {moment: server.run(run_program, name, killed, moment).code for moment in codes}
    killed_end = server.run(run_program, name, killed)

    assert whole_end.code == 0, whole_end.text
    assert killed_codes == codes
    assert killed_end.code == 0, killed_end.text
    assert read_variables(killed) == read_variables(whole)
    assert read_statistics(killed) == read_statistics(whole)


def read_variables(folder: str) -> dict[str, bytes]:
    reader = tf.train.load_checkpoint(folder)
    values = {}
    for name in reader.get_variable_to_shape_map():
        if "/by_name/" in name:
            values[name] = reader.get_tensor(name).tobytes()
    assert len(values) > 30
    return values


def read_statistics(folder: str) -> list[dict[str, Any]]:
    """Returns the records, without how far a thread has read ahead."""
    records = json.loads(Path(folder, "stats.json").read_text())
    for record in records:
        record.pop("QueueInput/queue_size", None)
    return records
