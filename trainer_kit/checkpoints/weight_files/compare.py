"""Compares the variables of two files of weights."""

from __future__ import annotations

import numpy as np

from trainer_kit.checkpoints.weight_files.weight_file import WeightFile, replace_numbers_by_ranks


def compare_weights(
    first: WeightFile, second: WeightFile, values: bool = True
) -> tuple[list[list[str]], int]:
    """Returns what differs between two files, and the number of variables that are equal.

    A difference is a list of three texts: the name of a variable, what differs (only one file has
    it, or its shape, dtype or value), and how. Runs on the host.

    Args:
      first: The one file.
      second: The other file.
      values: Whether to compare values too, variable by variable.

    Raises:
      StorageError: when a value cannot be read.
    """
    first_names, second_names = common_names(first, second)
    names = first_names.keys() | second_names.keys()

    rows = []
    for name in sorted(names):
        first_name = first_names.get(name)
        second_name = second_names.get(name)
        first_shape = _shape(first, first_name)
        second_shape = _shape(second, second_name)
        if not first_shape or not second_shape:
            path = first.path if first_shape else second.path
            shape = first_shape or second_shape
            rows.append([name, f"only in {path}", shape])
        elif first_shape != second_shape:
            change = f"{first_shape} -> {second_shape}"
            rows.append([name, "of another shape or dtype", change])
        elif values:
            first_value = first.read_tensor(first_names[name])
            second_value = second.read_tensor(second_names[name])
            difference = _describe_difference(first_value, second_value)
            if difference:
                rows.append([name, "of another value", difference])

    # Each name has at most one row.
    equal_count = len(names) - len(rows)
    return rows, equal_count


def common_names(first: WeightFile, second: WeightFile) -> tuple[dict[str, str], dict[str, str]]:
    """Returns a dict from common name to name in the file, for each of two files.

    Keras numbers layers over the life of a process, so that two files of one model may name a layer
    dense and dense_1. If that makes more names equal, and each name that is equal without it means
    the same, ranks replace the numbers.
    """
    first_names = {name: name for name in first.shapes}
    second_names = {name: name for name in second.shapes}
    first_ranks = replace_numbers_by_ranks(first_names)
    second_ranks = replace_numbers_by_ranks(second_names)

    equal_names = first_names.keys() & second_names.keys()
    equal_ranks = first_ranks.keys() & second_ranks.keys()
    if len(equal_ranks) <= len(equal_names):
        return first_names, second_names

    # Numbers that the user gave mean the same in both files.
    if first.has_user_numbers and second.has_user_numbers:
        return first_names, second_names
    for rank, name in first_ranks.items():
        if name in equal_names and second_ranks.get(rank) != name:
            return first_names, second_names
    return first_ranks, second_ranks


def _shape(file: WeightFile, name: str | None) -> str:
    if name is None:
        return ""
    shape = list(file.shapes[name])
    return f"{file.dtypes[name]} {shape}"


def _describe_difference(first: np.ndarray | bytes, second: np.ndarray | bytes) -> str:
    """Returns how two values of one shape and dtype differ.

    Returns "" if they are equal. NaN equals NaN.
    """
    first = np.asarray(first)
    second = np.asarray(second)
    if first.dtype.kind in "OSU":
        is_equal = np.array_equal(first, second)
        return "" if is_equal else "text"

    first_nan = np.isnan(first)
    second_nan = np.isnan(second)
    both_nan = first_nan & second_nan
    differ = (first != second) & ~both_nan
    if not differ.any():
        return ""

    # Wide enough for 64-bit integers, and for complex numbers.
    first_values = first[differ].astype(np.clongdouble)
    second_values = second[differ].astype(np.clongdouble)
    distances = np.abs(first_values - second_values)
    largest = np.max(distances)
    count = int(differ.sum())
    return f"{count} of {first.size} values, by at most {largest:.3g}"
