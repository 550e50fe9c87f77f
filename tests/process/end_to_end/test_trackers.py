"""A run with a tracker is killed, continued and taken back: its curves are those of the run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.builders import json_lines
from tests.fork_server import ForkServer
from tests.process.end_to_end.tracked_experiment import train_and_die_at_step
from trainer_kit.telemetry.metrics_jsonl import read_active_history

EXPERIMENT = "tests.process.end_to_end.tracked_experiment"


def _read_curve(records: list[dict[str, Any]], run_id: str) -> list[tuple[int, str, float]]:
    """Returns (step, kind, accuracy) of all reports of one run of the tracker."""
    curve = []
    for record in records:
        if record["id"] == run_id and "step" in record:
            numbers = record["numbers"]
            kind = "train" if "train/accuracy" in numbers else "validation"
            curve.append((record["step"], kind, numbers[f"{kind}/accuracy"]))
    return curve


def _read_history(folder: Path) -> list[tuple[int, str, float]]:
    return [
        (record["step"], record["kind"], record["metrics"]["accuracy"])
        for record in read_active_history(folder / "metrics.jsonl")
    ]


def test_the_curves_of_a_tracker_are_those_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = tmp_path / "tracker.jsonl"
    callbacks = f"[{{name: file_tracker, args: {{path: {path}}}}}]"
    arguments = [
        f"--import_module={EXPERIMENT}",
        "--experiment=tracked",
        "--mode=train_and_eval",
        f"--model_dir={folder}",
        f"--params_override=trainer: {{callbacks: {callbacks}}}",
    ]

    with ForkServer() as server:
        killed = server.run(train_and_die_at_step, 35, *arguments)
        steps_at_kill = [record["step"] for record in json_lines(path)]
        resumed = server.run("train", *arguments)
        whole_history = _read_history(folder)
        rewound = server.run("train", *arguments, "--from_step=40")

    assert killed.code == -signal.SIGKILL, killed.text
    assert resumed.code == 0, resumed.text
    assert rewound.code == 0, rewound.text
    assert "train_and_eval from step 20" in resumed.text
    # The tracker had reports of steps that were trained again.
    assert steps_at_kill[-2:] == [30, 30]

    records = json_lines(path)
    first_id, second_id = dict.fromkeys(record["id"] for record in records)
    assert _read_curve(records, first_id) == whole_history
    assert _read_curve(records, second_id) == _read_history(folder)
    assert records[-1]["parent"] == first_id
    ends = [(record["id"], record["end_state"]) for record in records if "end_state" in record]
    assert ends == [(first_id, "done"), (second_id, "done")]
