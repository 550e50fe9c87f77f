"""Two losses that the soak test makes while the trainer is down: metrics.jsonl or the ledger is emptied.

A run goes on after such a loss, and has to print what is missing. What was lost is kept outside the run and put back
before the comparison, so that all of the rest can be compared as usual.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints, step_of
from trainer_kit.checkpoints.commit import problem, read_record
from trainer_kit.evals.best.info_json import read_info

HISTORY, LEDGER = "metrics.jsonl", "evals/validation.jsonl"
WARNINGS = {"history emptied": "has lost reports", "ledger emptied": "has lost evaluations"}
LONG_AGO = 1000  # steps; damage to checkpoints does not take the run further back than that


def empty_history(run: Path, chance: random.Random) -> str:
    """Empties metrics.jsonl, if the checkpoint that the run goes on from records that there was something in it."""
    del chance
    return _empty(run, HISTORY) if _recorded(run, "history") else ""


def empty_ledger(run: Path, chance: random.Random) -> str:
    """Empties the ledger, if the newest checkpoint records that there was something in it, and info.json has the best.

    The best has to be of an early step: the run goes on from info.json alone, and a later one would come again.
    """
    del chance
    info, newest = read_info(str(run / "best_ckpt"), quiet=True), _newest(run)
    if not _recorded(run, "evaluations") or info is None or step_of(newest) < info["step"] + LONG_AGO:
        return ""
    return _empty(run, LEDGER)


def put_back(run: Path) -> None:
    """Puts the lines that were taken back into their files, in the order of the steps; later lines stay."""
    for name in (HISTORY, LEDGER):
        lines = {}
        for path in [*sorted(_taken(run, name), key=lambda path: int(path.suffix[1:])), run / name]:
            for record in files.read_lines(path):
                lines[record["step"], record.get("kind") == "validation"] = record
        if _taken(run, name):
            text = "".join(f"{json.dumps(lines[key])}\n" for key in sorted(lines))
            (run / name).write_text(text)


def _recorded(run: Path, what: str) -> bool:
    """Whether the newest whole checkpoint records that anything of the run's reports or evaluations was there."""
    newest = _newest(run)
    record = (read_record(newest) or {}) if newest else {}
    return max(record.get("recorded", {}).get(what, [0])) > 0


def _newest(run: Path) -> str:
    return next((path for path in reversed(complete_checkpoints(str(run)).values()) if not problem(path)), "")


def _empty(run: Path, name: str) -> str:
    text = (run / name).read_bytes() if (run / name).exists() else b""
    if not text:
        return ""
    kept = _folder(run) / f"{Path(name).name}.{len(_taken(run, name))}"
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(text)
    (run / name).write_bytes(b"")
    return f"{name}: {len(text.splitlines())} lines taken"


def _taken(run: Path, name: str) -> list[Path]:
    return list(_folder(run).glob(f"{Path(name).name}.*"))


def _folder(run: Path) -> Path:
    return run.parent / "taken"
