"""How many functions of ours lie between the command line and the function that each replica runs."""

from __future__ import annotations

from pathlib import Path

from tests.fork_server import ForkServer

MODULE, MOST = "tests.process.end_to_end.frames_experiment", 12


def test_at_most_12_frames_lie_between_main_and_a_replicas_step(tmp_path: Path) -> None:
    flags = ["--experiment=frames", "--mode=train_and_eval", f"--model_dir={tmp_path / 'run'}"]
    with ForkServer([MODULE]) as server:
        ended = server.run("train", f"--import_module={MODULE}", *flags)
    assert ended.code == 0, ended.text
    frames = [line.split()[1:] for line in ended.text.splitlines() if line.startswith("frame ")]
    first = [function for _, function in frames]
    assert "main" in first, frames
    trace = first[first.index("main") : first.index("_replica_train_step") + 1]
    assert len(trace) <= MOST, trace
