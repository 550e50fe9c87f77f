"""Compares the variables of two files of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer_kit.checkpoints.weight_files.weight_file import WeightFile, with_ranks

Difference = tuple[str, str, str]  # name, what differs, how


def differences(first: WeightFile, second: WeightFile, values: bool = True) -> Iterator[Difference]:
    """Yields what differs between two files: variables of one of them only, shapes, dtypes and values.

    Runs on the host.

    Args:
      first: The one file.
      second: The other file.
      values: Whether to compare values too, variable by variable.

    Raises:
      StorageError: when a value cannot be read.
    """
    ours, theirs = common_names(first, second)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield name, f"only in {first.path}", _shape(first, ours[name])
        elif name not in ours:
            yield name, f"only in {second.path}", _shape(second, theirs[name])
        elif (one := _shape(first, ours[name])) != (other := _shape(second, theirs[name])):
            yield name, "of another shape or dtype", f"{one} -> {other}"
        elif values and (detail := _difference(first.read(ours[name]), second.read(theirs[name]))):
            yield name, "of another value", detail


def common_names(first: WeightFile, second: WeightFile) -> tuple[dict[str, str], dict[str, str]]:
    """Returns a dict from common name to name in the file, for each of two files.

    Keras numbers layers over the life of a process, so that two files of one model may name a layer dense and dense_1.
    If that makes more names equal, and each name that is equal without it means the same, ranks replace the numbers.
    """
    ours, theirs = ({name: name for name in file.shapes} for file in (first, second))
    our_ranks, their_ranks = with_ranks(ours), with_ranks(theirs)
    by_rank = {name: their_ranks.get(rank) for rank, name in our_ranks.items()}
    same = ours.keys() & theirs.keys()
    exact = first.has_own_numbers and second.has_own_numbers
    more = not exact and len(our_ranks.keys() & their_ranks.keys()) > len(same)
    return (our_ranks, their_ranks) if more and all(by_rank[name] == name for name in same) else (ours, theirs)


def _shape(file: WeightFile, name: str) -> str:
    return f"{file.dtypes[name]} {list(file.shapes[name])}"


def _difference(one: Any, other: Any) -> str:
    """Returns how two values of one shape and dtype differ; "" if they are equal, NaN included."""
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype.kind in "OSU":
        return "" if np.array_equal(one, other) else "text"
    nan, other_nan = np.isnan(one), np.isnan(other)
    differ, in_one_file = (one != other) & ~nan & ~other_nan, int(np.sum(nan != other_nan))
    details = [f"by at most {_largest(one[differ], other[differ])}"] if differ.any() else []
    details += [f"NaN in one of the files: {in_one_file} of {one.size} values"] if in_one_file else []
    return "; ".join(details)


def _largest(one: np.ndarray, other: np.ndarray) -> str:
    """Returns the largest difference between values, of integers without rounding."""
    if one.dtype.kind in "biu":
        return str(max(abs(int(a) - int(b)) for a, b in zip(one.flat, other.flat, strict=True)))
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    return f"{np.max(np.abs(one.astype(wide) - other.astype(wide))):.3g}"
