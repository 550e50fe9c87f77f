"""Compares the variables of two files of weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer_kit.checkpoints.weight_files.weight_file import WeightFile, replace_numbers_by_ranks


def compare_weights(
    first: WeightFile, second: WeightFile, values: bool = True
) -> tuple[list[list[str]], int]:
    """Returns what differs between two files, and the number of variables that are equal. Runs on the host.

    A difference is a list of three texts: the name of a variable, what differs (only one file has
    it, or its shape, dtype or value), and how.

    Args:
      first: The one file.
      second: The other file.
      values: Whether to compare values too, variable by variable.

    Raises:
      StorageError: when a value cannot be read.
    """
    ours, theirs = common_names(first, second)
    rows = []
    for name in sorted(ours.keys() | theirs.keys()):
        here = _shape(first, ours.get(name))
        there = _shape(second, theirs.get(name))
        if not here or not there:
            rows.append([name, f"only in {first.path if here else second.path}", here or there])
        elif here != there:
            rows.append([name, "of another shape or dtype", f"{here} -> {there}"])
        elif values and (
            detail := _describe_difference(
                first.read_tensor(ours[name]), second.read_tensor(theirs[name])
            )
        ):
            rows.append([name, "of another value", detail])
    return rows, len(ours.keys() | theirs.keys()) - len(rows)


def common_names(first: WeightFile, second: WeightFile) -> tuple[dict[str, str], dict[str, str]]:
    """Returns a dict from common name to name in the file, for each of two files.

    Keras numbers layers over the life of a process, so that two files of one model may name a layer
    dense and dense_1. If that makes more names equal, and each name that is equal without it means
    the same, ranks replace the numbers.
    """
    ours = {name: name for name in first.shapes}
    theirs = {name: name for name in second.shapes}
    our_ranks = replace_numbers_by_ranks(ours)
    their_ranks = replace_numbers_by_ranks(theirs)
    same = ours.keys() & theirs.keys()
    agree = all(their_ranks.get(rank) == name for rank, name in our_ranks.items() if name in same)
    have_own_numbers = first.has_user_numbers and second.has_user_numbers
    if agree and not have_own_numbers and len(our_ranks.keys() & their_ranks.keys()) > len(same):
        return our_ranks, their_ranks
    return ours, theirs


def _shape(file: WeightFile, name: str | None) -> str:
    return "" if name is None else f"{file.dtypes[name]} {list(file.shapes[name])}"


def _describe_difference(first: Any, second: Any) -> str:
    """Returns how two values of one shape and dtype differ; "" if they are equal, NaN included."""
    first = np.asarray(first)
    second = np.asarray(second)
    if first.dtype.kind in "OSU":
        return "" if np.array_equal(first, second) else "text"
    differ = (first != second) & ~(np.isnan(first) & np.isnan(second))
    if not differ.any():
        return ""
    # Wide enough for 64-bit integers, and for complex numbers.
    distances = np.abs(first[differ].astype(np.clongdouble) - second[differ].astype(np.clongdouble))
    return f"{int(differ.sum())} of {first.size} values, by at most {np.max(distances):.3g}"
