"""The classes of a data set: labels.txt, and the share of them that a run uses."""

from __future__ import annotations

import os
from typing import Any

from trainer_kit.compat.pipelines.record_files import MissingFilesError, content_of, local_folder
from trainer_kit.errors import DataError, UsageError

_FILE = "labels.txt"


def get_labels(dataset_path: str | os.PathLike[str], percentage: float = 100) -> tuple[int, list[str]]:
    """Returns the number of classes and their labels, from `dataset_path`/labels.txt: UTF-8, one label a line.

    The index of a label in the list is the number of its class. Blank lines, and spaces around a label, do not count.

    Args:
      dataset_path: The folder of the data set.
      percentage: The share of the classes, from 1 to 100: the first ones of the file, rounded down, and at
        least one. So the classes of a smaller share have the same numbers in a larger one. `get_train_ds` and
        `get_valid_ds` with the same percentage read the examples of these classes only.

    Raises:
      UsageError: for a percentage out of its bounds, and for a remote folder.
      DataError: when the file is missing (it is a FileNotFoundError too), has no label or one twice, or is not UTF-8.
    """
    share, folder = checked_percentage(percentage), local_folder(dataset_path)
    path = os.path.join(folder, _FILE)
    try:
        with open(path, encoding="utf-8-sig") as file:  # with or without a byte order mark
            lines = [line.strip() for line in file]  # open() reads \r\n as \n
    except FileNotFoundError as error:
        raise MissingFilesError(f"{path} is missing: it holds one label a line; {content_of(folder, _FILE)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    labels = [line for line in lines if line]
    if not labels:
        raise DataError(f"{path} has no label; write one label a line")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        first, second = [number for number, line in enumerate(lines, 1) if line == twice][:2]
        raise DataError(f"{path}: lines {first} and {second} have the same label {twice!r}; each class has one line")
    kept = labels[: max(1, int(len(labels) * share / 100))]
    return len(kept), kept


def checked_percentage(percentage: Any) -> float:
    """Returns a percentage as a float.

    Raises:
      UsageError: for anything but a number from 1 to 100; a smaller one was probably meant as a fraction.
    """
    try:
        share = float(percentage)
    except (TypeError, ValueError):
        share = 0.0
    if not 1 <= share <= 100:
        raise UsageError(f"percentage={percentage!r} is not from 1 to 100: give 100 for all classes, 50 for half")
    return share
