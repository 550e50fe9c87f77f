"""Loads initial weights from files of trainer_kit or of other programs.

The files are checkpoints and files of weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import tensorflow as tf

from trainer_kit.checkpoints.state.strict_restore import format_differences
from trainer_kit.checkpoints.weight_files.open_file import open_weights
from trainer_kit.checkpoints.weight_files.weight_file import MODEL, WeightFile
from trainer_kit.config.schema.initial_weights import InitCheckpointConfig
from trainer_kit.errors import UsageError
from trainer_kit.evals.checkpoint_selection import resolve_weights_path
from trainer_kit.optimizers.per_variable import check_patterns
from trainer_kit.training.initial_weights.variable_matching import (
    Shape,
    apply_renames,
    names_in_file,
    weights_by_path,
)
from trainer_kit.typing import Model

_LOG = logging.getLogger(__name__)
_OPTION = "task.init_checkpoint"
# The names in a line of the log.
_LISTED = 8


def load_initial_weights(model: Model, sources: str | Sequence[InitCheckpointConfig]) -> list[str]:
    """Loads weights of a model from one or more files, and logs what it took.

    Runs eagerly, in strategy scope.

    Args:
      model: A built model of Keras 3 or tf_keras, or a tf.Module.
      sources: The path of a checkpoint that has all weights, or sections that say what each file
        gives. They are applied in order, so that a later one replaces the values of an earlier one.

    Returns:
      The logged report of each file.

    Raises:
      UsageError: when there is no such file, a pattern matches nothing, or a variable is missing or
        has another shape. The model is then unchanged.
      StorageError: when a file is damaged.
    """
    if isinstance(sources, str):
        sections = {_OPTION: InitCheckpointConfig(path=sources)}
    else:
        sections = {}
        for number, section in enumerate(sources):
            sections[f"{_OPTION}.{number}"] = section

    # All files are checked before the first value is assigned, so an error leaves the model
    # unchanged.
    weights = weights_by_path(model)
    files: dict[str, WeightFile] = {}
    for option, section in sections.items():
        try:
            path = resolve_weights_path(section.path)
            files[option] = open_weights(path)
        except UsageError as error:
            raise UsageError(f"{option}: {error}") from error

    plans = {
        option: _plan(model, weights, option, sections[option], file)
        for option, file in files.items()
    }

    for option, (names, report) in plans.items():
        for path, name in names.items():
            variable = weights[path]
            value = files[option].read_tensor(name)

            # Of another shape, only the part that both shapes have is assigned.
            if value.shape != tuple(variable.shape):
                merged = variable.numpy()
                slices = []
                for sizes in zip(merged.shape, value.shape, strict=True):
                    shared_size = min(sizes)
                    slices.append(slice(shared_size))
                shared = tuple(slices)
                merged[shared] = value[shared]
                value = merged

            converted_value = tf.cast(value, variable.dtype)
            variable.assign(converted_value)
        _LOG.info("%s", report)
    return [report for _, report in plans.values()]


def _plan(
    model: Model,
    weights: Mapping[str, tf.Variable],
    option: str,
    config: InitCheckpointConfig,
    file: WeightFile,
) -> tuple[dict[str, str], str]:
    """Returns what to load from a file.

    Returns:
      The names in the file of the variables to load, by path, and a report about all variables.
    """
    weight_paths = list(weights)
    check_patterns(f"{option}.variables", config.variables, weight_paths)
    check_patterns(f"{option}.exclude", config.exclude, weight_paths)
    new_names = None
    if config.rename:
        replacements = config.rename.items()
        new_names = apply_renames(file, replacements, f"{option}.rename")

    # Without patterns, all variables are included.
    chosen = {}
    for path, variable in weights.items():
        is_included = any(re.search(pattern, path) for pattern in config.variables)
        if config.variables and not is_included:
            continue
        is_excluded = any(re.search(pattern, path) for pattern in config.exclude)
        if is_excluded:
            continue
        chosen[path] = variable

    # A variable that the file has in another shape is sliced, or it is a misfit.
    names, by_rank = names_in_file(model, chosen, file, new_names)
    taken: dict[str, str] = {}
    sliced: list[str] = []
    misfits: list[tuple[str, str, Shape | None, Shape]] = []
    for path, variable in chosen.items():
        shape = tuple(variable.shape)
        saved = file.shapes[names[path]] if path in names else None
        if saved == shape:
            taken[path] = names[path]
        elif saved is not None and config.other_shapes == "slice" and len(saved) == len(shape):
            taken[path] = names[path]
            sliced.append(path)
        else:
            problem = "missing in the file" if saved is None else "another shape"
            misfits.append((path, problem, saved, shape))

    # With other_shapes=skip, only a missing variable is an error.
    skipped: list[str] = []
    if config.other_shapes == "skip":
        skipped = [path for path, _, saved, _ in misfits if saved is not None]
    if len(misfits) > len(skipped) or not taken:
        # Rows of one layer follow one another.
        misfits.sort(key=lambda row: row[0].rpartition("/"))
        table = format_differences(misfits)
        raise UsageError(
            f"{option}: {len(misfits)} of the {len(chosen)} chosen variables cannot be loaded from "
            f"{file.path}, {file.kind}; "
            "give a list of sections with exclude, rename or other_shapes; "
            f"nothing was loaded\n{table}"
        )

    by_order = []
    for path, name in taken.items():
        if path in by_rank:
            by_order.append(f"{path} = {name}")
    unchosen_paths = [path for path in weights if path not in chosen]

    # Of a checkpoint, only the section of the model counts as not used.
    saved_names = [name for name in file.shapes if name.startswith(MODEL)]
    if not saved_names:
        saved_names = list(file.shapes)
    used_names = set(names.values())
    unused_names = sorted(set(saved_names) - used_names)

    notes = {
        "by the order of layers, since their numbers differ": by_order,
        "a part of": sliced,
        "left new for their shape": skipped,
        "left new, since they are not chosen": unchosen_paths,
        "not used of the file": unused_names,
    }
    report = (
        f"initial weights: took {len(taken)} of {len(weights)} variables "
        f"from {file.path}, {file.kind}"
    )
    for label, paths in notes.items():
        if not paths:
            continue
        first_paths = ", ".join(paths[:_LISTED])
        count = len(paths)
        more = f", ... ({count} in all)" if count > _LISTED else ""
        report += f"\n  {label}: {first_paths}{more}"
    return taken, report
