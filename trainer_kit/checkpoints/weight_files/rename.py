"""Writes a copy of a file of weights as a checkpoint with other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.weight_files.new_file import new_file
from trainer_kit.checkpoints.weight_files.tensorflow_file import SAVED_MODEL, TensorFlowFile
from trainer_kit.checkpoints.weight_files.weight_file import MODEL, WeightFile
from trainer_kit.errors import UsageError


def write_renamed(file: WeightFile, names: Mapping[str, str], output: str) -> None:
    """Writes a checkpoint of trainer_kit's form with the variables of a file under other names. Runs eagerly.

    The part before the first slash of a name is a section of the checkpoint, such as model or optimizer. Names of a
    file without sections are put into the section model.

    Args:
      file: The file of weights.
      names: A dict from new name to name in the file.
      output: The prefix of the new checkpoint.

    Raises:
      UsageError: when the output exists, or a checkpoint cannot have the names.
      StorageError: when a file cannot be read or written.
    """
    has_sections = isinstance(file, TensorFlowFile) and file.kind != SAVED_MODEL and file.has_graph
    sections: dict[str, Any] = {}
    for new, name in names.items():
        section, _, inner = (new if has_sections else f"{MODEL}{new.removeprefix(MODEL)}").partition("/")
        _check_section(new, section, inner, sections)
        variable = tf.Variable(file.read(name), trainable=False)
        if not inner:
            sections[section] = variable
        else:
            sections.setdefault(section, {})[inner] = variable
    with new_file(output) as path:
        tf.train.Checkpoint(**sections).write(path)


def _check_section(new: str, section: str, inner: str, sections: Mapping[str, Any]) -> None:
    """Checks that a checkpoint can have a new name besides the names in its sections so far."""
    if not section or section == "root" or hasattr(tf.train.Checkpoint(), section):
        raise UsageError(
            f"--rename: a checkpoint cannot have the variable {new!r}, since {section!r} cannot name a section; "
            "replace the part before the first slash by another word"
        )
    there = sections.get(section)
    if there is not None and not (inner and isinstance(there, dict)):
        raise UsageError(
            f"--rename: {section!r} would name a variable and also a section with variables; change the patterns"
        )
