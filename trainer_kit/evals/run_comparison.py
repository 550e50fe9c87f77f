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
from trainer_kit.telemetry.report import DEVICE_USAGE_FIELDS

_LEFT_OVER = ("**/*_temp", "**/.*.tmp", "**/checkpoint.tmp*", "**/.saving-*")
# The counter of the saves of the process, which are not part of the run
_NOT_COMPARED = ("save_counter",)


def compare_runs(
    first_run: str | os.PathLike[str], second_run: str | os.PathLike[str]
) -> list[str]:
    """Returns the differences of two finished runs, one line each.

    Compares, bit by bit, the variables of the newest checkpoint and of the best ones. It also
    compares, without clock times, info.json, the evaluations since the last rewind, metrics.jsonl
    and final.json, and lists files that dead processes left. Runs eagerly, on the host.

    Args:
      first_run: The folder of the one run.
      second_run: The folder of the other run.

    Returns:
      The lines. The list is empty when the runs are equal.
    """
    folders = (os.fspath(first_run), os.fspath(second_run))
    histories = [_history(folder) for folder in folders]
    differences = _compare_lines("metrics.jsonl", *histories)

    newest_prefixes = []
    for folder in folders:
        prefixes = complete_checkpoints(folder).values()
        newest_prefix = next(reversed(prefixes), None)
        newest_prefixes.append(newest_prefix)
    differences += _compare_variables("newest checkpoint", *newest_prefixes)

    best_infos = []
    best_prefixes = []
    for folder in folders:
        # The config names the folder of the best weights.
        info_pattern = f"{glob.escape(folder)}/*/{INFO}"
        info_paths = sorted(glob.glob(info_pattern))
        default_path = os.path.join(folder, "best_ckpt", INFO)
        info_path = info_paths[0] if info_paths else default_path
        best_info = _read_json(info_path)
        best_infos.append(best_info)

        best_folder = os.path.dirname(info_path)
        info = read_info(best_folder, quiet=True)
        best_prefix = None
        if info is not None:
            best_prefix = os.path.join(best_folder, info["checkpoint"])
        best_prefixes.append(best_prefix)
    differences += _compare_values("best info", *best_infos)
    differences += _compare_variables("best checkpoint", *best_prefixes)

    names: set[str] = set()
    parents = [os.path.join(folder, BEST_CHECKPOINTS) for folder in folders]
    for parent in parents:
        if os.path.isdir(parent):
            names.update(os.listdir(parent))

    for name in sorted(names):
        best_folders = [os.path.join(parent, name) for parent in parents]
        differences += _compare_named_best_checkpoint(name, *best_folders)

    evaluations = [_evaluations(folder) for folder in folders]
    differences += _compare_lines("evals/validation.jsonl", *evaluations)

    finals = []
    for folder in folders:
        final_path = os.path.join(folder, "final.json")
        final = _read_json(final_path)
        if isinstance(final, dict):
            final = _omit_fields(final, ("time",))
        finals.append(final)
    differences += _compare_values("final.json", *finals)

    for folder in folders:
        leftover_paths = find_leftover_files(folder)
        differences += [f"left over: {path}" for path in leftover_paths]
    return differences


def find_first_different_step(
    first_run: str | os.PathLike[str], second_run: str | os.PathLike[str]
) -> int | None:
    """Returns the first step at which the histories of two runs differ, or None."""
    first_history = _history(os.fspath(first_run))
    second_history = _history(os.fspath(second_run))
    for first, second in zip(first_history, second_history, strict=False):
        if json.dumps(first) != json.dumps(second):
            first_step = int(first["step"])
            second_step = int(second["step"])
            return min(first_step, second_step)
    return None


def find_leftover_files(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the files that processes left in a run's folder when they died while writing.

    The paths are relative to the folder.
    """
    root = os.fspath(folder)
    paths: list[str] = []
    for pattern in _LEFT_OVER:
        paths += glob.glob(pattern, root_dir=root, recursive=True)
    return sorted(paths)


def _compare_named_best_checkpoint(name: str, first_folder: str, second_folder: str) -> list[str]:
    """Returns the differences of a named best checkpoint: weights, steps and info.json."""
    first_checkpoints = complete_checkpoints(first_folder)
    second_checkpoints = complete_checkpoints(second_folder)
    first_path = os.path.join(first_folder, INFO)
    second_path = os.path.join(second_folder, INFO)
    first_info = _read_json(first_path)
    second_info = _read_json(second_path)
    differences = _compare_values(f"best {name} info", first_info, second_info)

    first_steps = list(first_checkpoints)
    second_steps = list(second_checkpoints)
    differences += _compare_values(f"best {name} steps", first_steps, second_steps)
    for step in first_checkpoints.keys() & second_checkpoints.keys():
        differences += _compare_variables(
            f"best {name} ckpt-{step}", first_checkpoints[step], second_checkpoints[step]
        )
    return differences


def _compare_variables(what: str, first_path: str | None, second_path: str | None) -> list[str]:
    """Returns a line with the first variable that differs and the number of those that do.

    The list is empty if none does.
    """
    if first_path is None or second_path is None:
        if first_path == second_path:
            return []
        return [f"{what}: {first_path}, {second_path}"]

    try:
        first_reader = tf.train.load_checkpoint(first_path)
        second_reader = tf.train.load_checkpoint(second_path)
        first_names = set(first_reader.get_variable_to_shape_map())
        second_names = set(second_reader.get_variable_to_shape_map())
        compared = set()
        for name in first_names | second_names:
            section, _, _ = name.partition("/")
            if section not in _NOT_COMPARED:
                compared.add(name)

        names_of_one_run = first_names ^ second_names
        unmatched = sorted(names_of_one_run & compared)
        if unmatched:
            more = len(unmatched) - 1
            return [f"{what}: only one run has {unmatched[0]} (and {more} more)"]

        different = []
        for name in sorted(compared):
            first = first_reader.get_tensor(name)
            second = second_reader.get_tensor(name)
            if not _are_identical(first, second):
                different.append(name)
    except (tf.errors.OpError, ValueError, IndexError) as error:
        return [f"{what}: one of {first_path} and {second_path} cannot be read ({error})"]
    if not different:
        return []

    # The values of the first variable that differs
    first_different = different[0]
    first = np.asarray(first_reader.get_tensor(first_different))
    second = np.asarray(second_reader.get_tensor(first_different))
    difference = f"{first!r:.200} and {second!r:.200}"
    is_number = first.dtype.kind in "fiu"
    if first.shape == second.shape and is_number:
        # The difference of unsigned integers would overflow.
        first_values = first.astype(np.float64)
        second_values = second.astype(np.float64)
        distances = np.abs(first_values - second_values)
        largest = np.max(distances)
        difference = f"by up to {largest:g}"
    return [
        f"{what}: {first_different} differs, {difference} "
        f"({len(different)} of {len(compared)} variables differ)"
    ]


def _are_identical(first: np.ndarray | bytes, second: np.ndarray | bytes) -> bool:
    first = np.asarray(first)
    second = np.asarray(second)
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # An array of strings contains their addresses.
    if first.dtype == object:
        return bool(np.all(first == second))
    return bool(first.tobytes() == second.tobytes())


def _evaluations(folder: str) -> list[Any]:
    path = os.path.join(folder, "evals", "validation.jsonl")
    ledger = Ledger(path, dataset="validation", config_hash="")
    records = active_records(ledger.records())

    # A stopped run has saved additional steps. If such a step is evaluated, its record names the
    # checkpoint. A run that is killed after a recovery may go back once more, in another lineage.
    return [_omit_fields(record, ("seconds", "checkpoint", "lineage")) for record in records]


def _history(folder: str) -> list[Any]:
    path = os.path.join(folder, "metrics.jsonl")
    records = files.read_json_lines(path)
    return [_omit_fields(record, (*WALL_CLOCK_FIELDS, *DEVICE_USAGE_FIELDS)) for record in records]


def _omit_fields(record: Mapping[str, object], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


def _read_json(path: str) -> Any:
    """Returns the content of a JSON file, or None if there is no file.

    If the file is damaged, the text of the error is returned.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read()
        return files.parse_json(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return str(error)


def _compare_lines(
    what: str, first_lines: Sequence[object], second_lines: Sequence[object]
) -> list[str]:
    pairs = zip(first_lines, second_lines, strict=False)
    for number, (first, second) in enumerate(pairs, 1):
        # Lines are compared as text, since NaN has to equal NaN.
        first_text = json.dumps(first)
        second_text = json.dumps(second)
        if first_text != second_text:
            return [f"{what}: line {number}: {first_text} in one, {second_text} in the other"]
    if len(first_lines) != len(second_lines):
        return [f"{what}: {len(first_lines)} lines, {len(second_lines)}"]
    return []


def _compare_values(what: str, first_value: object, second_value: object) -> list[str]:
    first_text = json.dumps(first_value)
    second_text = json.dumps(second_value)
    if first_text == second_text:
        return []
    return [f"{what}: {first_text} in one, {second_text} in the other"]
