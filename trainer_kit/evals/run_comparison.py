"""Compares two finished runs bit by bit: one that was killed repeatedly, and one that was not."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.evals.best.info_json import INFO, read_info
from trainer_kit.evals.ledger import Ledger, active_records
from trainer_kit.telemetry.metrics_jsonl import WALL_CLOCK_FIELDS

_LEFT_OVER = ("**/*_temp", "**/.*.tmp", "**/checkpoint.tmp*", "**/.saving-*")
_NOT_COMPARED = ("save_counter",)  # counts the saves of the process, which are not part of the run


def compare_runs(
    first_run: str | os.PathLike[str], second_run: str | os.PathLike[str]
) -> list[str]:
    """Returns the differences of two finished runs, one line each; [] when they are equal. Runs eagerly, on the host.

    Compares, bit by bit, the variables of the newest checkpoint and of the best ones; and, without
    clock times, info.json, the evaluations since the last rewind, metrics.jsonl and final.json.
    Also lists files that dead processes left.

    Args:
      one, other: The folders of the runs.
    """
    sides = (os.fspath(first_run), os.fspath(second_run))
    differences = _compare_lines("metrics.jsonl", *(_history(side) for side in sides))
    differences += _compare_variables(
        "newest checkpoint", *(_find_newest_checkpoint(side) for side in sides)
    )
    differences += _compare_values(
        "best info", *(_read_json(_find_best_info_path(side)) for side in sides)
    )
    differences += _compare_variables("best checkpoint", *(_best_weights(side) for side in sides))
    for name in sorted({name for side in sides for name in _list_named_best_checkpoints(side)}):
        differences += _compare_named_best_checkpoint(
            name, *(os.path.join(side, BEST_CHECKPOINTS, name) for side in sides)
        )
    differences += _compare_lines("evals/validation.jsonl", *(_evaluations(side) for side in sides))
    finals = [_read_json(os.path.join(side, "final.json")) for side in sides]
    differences += _compare_values(
        "final.json",
        *(_omit_fields(final, ("time",)) if isinstance(final, dict) else final for final in finals),
    )
    return differences + [
        f"left over: {path}" for side in sides for path in find_leftover_files(side)
    ]


def find_first_different_step(
    first_run: str | os.PathLike[str], second_run: str | os.PathLike[str]
) -> int | None:
    """Returns the first step at which the histories of two runs differ; None if they are equal."""
    sides = [_history(os.fspath(side)) for side in (first_run, second_run)]
    for first, second in zip(*sides, strict=False):
        if json.dumps(first) != json.dumps(second):
            return min(int(first["step"]), int(second["step"]))
    return None


def find_leftover_files(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the files that processes left in a run's folder when they died while writing, relative to it."""
    inside = os.fspath(folder)
    return sorted(
        path
        for pattern in _LEFT_OVER
        for path in glob.glob(pattern, root_dir=inside, recursive=True)
    )


def _find_newest_checkpoint(folder: str) -> str | None:
    return next(reversed(complete_checkpoints(folder).values()), None)


def _find_best_info_path(folder: str) -> str:
    return next(
        iter(sorted(glob.glob(f"{glob.escape(folder)}/*/{INFO}"))),
        os.path.join(folder, "best_ckpt", INFO),
    )


def _best_weights(folder: str) -> str | None:
    place = os.path.dirname(_find_best_info_path(folder))
    info = read_info(place, quiet=True)
    return os.path.join(place, str(info["checkpoint"])) if info is not None else None


def _list_named_best_checkpoints(folder: str) -> list[str]:
    place = os.path.join(folder, BEST_CHECKPOINTS)
    return os.listdir(place) if os.path.isdir(place) else []


def _compare_named_best_checkpoint(name: str, first_folder: str, second_folder: str) -> list[str]:
    """Returns the differences of a named best checkpoint: weights, steps and info.json."""
    sides = [complete_checkpoints(side) for side in (first_folder, second_folder)]
    differences = _compare_values(
        f"best {name} info",
        *(_read_json(os.path.join(side, INFO)) for side in (first_folder, second_folder)),
    )
    differences += _compare_values(f"best {name} steps", *(list(side) for side in sides))
    for step in sides[0].keys() & sides[1].keys():
        differences += _compare_variables(
            f"best {name} ckpt-{step}", *(side[step] for side in sides)
        )
    return differences


def _compare_variables(what: str, first_path: str | None, second_path: str | None) -> list[str]:
    """Returns a line with the first variable that differs and the number of those that do; [] if none does."""
    if first_path is None or second_path is None:
        return [] if first_path == second_path else [f"{what}: {first_path}, {second_path}"]
    try:
        sides = [tf.train.load_checkpoint(path) for path in (first_path, second_path)]
        shapes = [side.get_variable_to_shape_map() for side in sides]
        names = [
            {name for name in side if name.split("/")[0] not in _NOT_COMPARED} for side in shapes
        ]
        if lone := sorted(names[0] ^ names[1]):
            return [f"{what}: only one run has {lone[0]} (and {len(lone) - 1} more)"]
        wrong = [
            name
            for name in sorted(names[0])
            if not _are_identical(*(side.get_tensor(name) for side in sides))
        ]
    except (tf.errors.OpError, ValueError, IndexError) as error:
        return [f"{what}: one of {first_path} and {second_path} cannot be read ({error})"]
    if not wrong:
        return []

    first, second = (np.asarray(side.get_tensor(wrong[0])) for side in sides)
    difference = f"{first!r:.200} and {second!r:.200}"
    if first.shape == second.shape and first.dtype.kind in "fiu":
        difference = (
            f"by up to {np.max(np.abs(first.astype(np.float64) - second.astype(np.float64))):g}"
        )
    return [
        f"{what}: {wrong[0]} differs, {difference} ({len(wrong)} of {len(names[0])} variables"
        " differ)"
    ]


def _are_identical(first: Any, second: Any) -> bool:
    first, second = np.asarray(first), np.asarray(second)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    # An array of strings holds their addresses.
    return (
        bool(np.all(first == second))
        if first.dtype == object
        else first.tobytes() == second.tobytes()
    )


def _evaluations(folder: str) -> list[Any]:
    ledger = Ledger(
        os.path.join(folder, "evals", "validation.jsonl"), dataset="validation", config_hash=""
    )
    # A stopped run has saved additional steps; if such a step is evaluated, its record names the
    # checkpoint. A run that is killed after a recovery may go back once more, in another lineage.
    return [
        _omit_fields(record, ("seconds", "checkpoint", "lineage"))
        for record in active_records(ledger.records())
    ]


def _history(folder: str) -> list[Any]:
    return [
        _omit_fields(record, WALL_CLOCK_FIELDS)
        for record in files.read_json_lines(os.path.join(folder, "metrics.jsonl"))
    ]


def _omit_fields(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


def _read_json(path: str) -> Any:
    """Returns the content of a JSON file; None if there is no file, the text of the error if it is damaged."""
    try:
        with open(path, "rb") as stream:
            return files.parse_json(stream.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return str(error)


def _compare_lines(what: str, first_lines: Sequence[Any], second_lines: Sequence[Any]) -> list[str]:
    for number, (first, second) in enumerate(zip(first_lines, second_lines, strict=False)):
        if json.dumps(first) != json.dumps(second):  # as text, since NaN has to equal NaN
            return [
                f"{what}: line {number + 1}: {json.dumps(first)} in one, {json.dumps(second)} in"
                " the other"
            ]
    return (
        []
        if len(first_lines) == len(second_lines)
        else [f"{what}: {len(first_lines)} lines, {len(second_lines)}"]
    )


def _compare_values(what: str, first_value: Any, second_value: Any) -> list[str]:
    first, second = json.dumps(first_value), json.dumps(second_value)
    return [] if first == second else [f"{what}: {first} in one, {second} in the other"]
