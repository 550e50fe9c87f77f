"""Two losses that the soak test causes while the trainer is down.

It empties metrics.jsonl or the ledger.

The run continues after such a loss, and has to print what is missing. The lost lines are kept
outside the run and put back before the comparison, so that everything else can be compared as
usual.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints, parse_step
from trainer_kit.checkpoints.commit import describe_damage, read_commit_record
from trainer_kit.evals.best.info_json import read_info

HISTORY = "metrics.jsonl"
LEDGER = "evals/validation.jsonl"
WARNINGS = {"history emptied": "has lost reports", "ledger emptied": "has lost evaluations"}
LONG_AGO = 1000  # steps; damaged checkpoints never set the run back further


def empty_history(run: Path, chance: random.Random) -> str:
    """Empties metrics.jsonl, if the newest checkpoint records that the file had content."""
    del chance
    return _empty_file(run, HISTORY) if _is_recorded(run, "history") else ""


def empty_ledger(run: Path, chance: random.Random) -> str:
    """Empties the ledger, if the newest checkpoint records that it had content.

    info.json has the best, too.

    The best has to be of an early step: the run continues from info.json alone, and would repeat a
    later evaluation.
    """
    del chance
    info = read_info(str(run / "best_ckpt"), quiet=True)
    newest = _find_newest_checkpoint(run)
    if (
        not _is_recorded(run, "evaluations")
        or info is None
        or parse_step(newest) < info["step"] + LONG_AGO
    ):
        return ""
    return _empty_file(run, LEDGER)


def restore_lines(run: Path) -> None:
    """Puts the removed lines back into their files, in the order of their steps.

    Later lines stay.
    """
    for name in (HISTORY, LEDGER):
        lines = {}
        for path in [
            *sorted(_list_backups(run, name), key=lambda path: int(path.suffix[1:])),
            run / name,
        ]:
            for record in files.read_json_lines(path):
                lines[record["step"], record.get("kind") == "validation"] = record
        if _list_backups(run, name):
            text = "".join(f"{json.dumps(lines[key])}\n" for key in sorted(lines))
            (run / name).write_text(text)


def _is_recorded(run: Path, what: str) -> bool:
    """Whether the newest complete checkpoint records that reports or evaluations existed."""
    newest = _find_newest_checkpoint(run)
    record = (read_commit_record(newest) or {}) if newest else {}
    return max(record.get("recorded", {}).get(what, [0])) > 0


def _find_newest_checkpoint(run: Path) -> str:
    return next(
        (
            path
            for path in reversed(complete_checkpoints(str(run)).values())
            if not describe_damage(path)
        ),
        "",
    )


def _empty_file(run: Path, name: str) -> str:
    text = (run / name).read_bytes() if (run / name).exists() else b""
    if not text:
        return ""
    kept = _folder(run) / f"{Path(name).name}.{len(_list_backups(run, name))}"
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(text)
    (run / name).write_bytes(b"")
    return f"{name}: {len(text.splitlines())} lines removed"


def _list_backups(run: Path, name: str) -> list[Path]:
    return list(_folder(run).glob(f"{Path(name).name}.*"))


def _folder(run: Path) -> Path:
    return run.parent / "taken"
