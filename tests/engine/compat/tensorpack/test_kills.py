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


@pytest.fixture(scope="module")
def whole_runs(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    for name in ("convnet", "gan"):
        end = server.run(run_program, name, str(folder / name))
        assert end.code == 0, end.text
    return folder


@pytest.mark.parametrize(
    ("name", "moments", "code"),
    [
        ("convnet", ("KILL@step:2", "KILL@step:8", "KILL@inference:15"), KILL),
        ("convnet", ("save:2",), KILL),
        ("convnet", ("TERM@step:8",), ExitCode.PREEMPTED),
        ("gan", ("KILL@step:3", "KILL@step:20"), KILL),
        ("gan", ("TERM@step:11",), ExitCode.PREEMPTED),
    ],
)
def test_a_killed_program_ends_with_the_same_bits(
    server: ForkServer,
    whole_runs: Path,
    tmp_path: Path,
    name: str,
    moments: tuple[str, ...],
    code: int,
) -> None:
    folder = str(tmp_path / "run")

    codes = [server.run(run_program, name, folder, moment).code for moment in moments]
    end = server.run(run_program, name, folder)

    assert codes == [code] * len(moments)
    assert end.code == 0, end.text
    assert read_variables(folder) == read_variables(str(whole_runs / name))
    assert read_statistics(folder) == read_statistics(str(whole_runs / name))


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
