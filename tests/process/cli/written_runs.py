"""Run directories written by hand, for the states of a run that are hard to come by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def evaluation(
    step: int, lineage: int = 0, dataset: str = "validation", **metrics: Any
) -> dict[str, Any]:
    """Returns a record of a ledger."""
    return {
        "step": step,
        "checkpoint": f"ckpt-{step}",
        "dataset": dataset,
        "metrics": metrics,
        "seconds": 0.5,
        "config_hash": "0",
        "lineage": lineage,
    }


def write_ledger(folder: Path, *records: dict[str, Any] | str, name: str = "validation") -> Path:
    """Writes evals/<name>.jsonl, text as it is; returns `folder`."""
    path = folder / "evals" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) + "\n" for record in records]
    path.write_text("".join(lines))
    return folder


def write_params(folder: Path, **trainer: Any) -> Path:
    """Writes a params.yaml with this trainer section; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(json.dumps({"trainer": trainer}))
    return folder


def write_process(path: Path, **fields: Any) -> Path:
    """Writes a heartbeat or a lease; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))
    return path
