"""Loads initial weights from checkpoints and files of weights, of trainer_kit or of other programs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import ROOT
from trainer_kit.checkpoints.state.strict_restore import differences_table, restore, saved_shapes, wanted_shapes
from trainer_kit.checkpoints.state.variable_names import item_variables, layer_names, model_variables
from trainer_kit.checkpoints.weight_files.open_file import open_weights
from trainer_kit.checkpoints.weight_files.tensorflow_file import TensorFlowFile
from trainer_kit.checkpoints.weight_files.weight_file import MODEL, WeightFile
from trainer_kit.config.schema.initial_weights import InitCheckpointConfig
from trainer_kit.errors import UsageError
from trainer_kit.evals.checkpoint_selection import weights_at
from trainer_kit.optimizers.per_variable import check_patterns
from trainer_kit.training.initial_weights.names import names_in_file, replaced_names, weights_by_path

_LOG = logging.getLogger(__name__)
_OPTION = "task.init_checkpoint"
_LISTED = 8  # names in a line of the log


@dataclass(frozen=True)
class LoadedFile:
    """The variables that one file of weights has given to a model.

    Attributes:
      path: The path of the file, or the prefix of the checkpoint.
      kind: The kind of the file.
      taken: A dict from the path of each loaded variable of the model to its name in the file.
      by_rank: The paths of those that were found by the rank of a layer's number, and not by the number itself.
      sliced: The paths of those of which a part was loaded.
      skipped: The paths of variables that have another shape in the file, and were left as they were.
      new: The paths of variables that were not chosen.
      unused: The names of the file's other variables.
    """

    path: str
    kind: str
    taken: dict[str, str] = field(default_factory=dict)
    by_rank: list[str] = field(default_factory=list)
    sliced: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        whole = len(self.taken) + len(self.skipped) + len(self.new)
        parts = [f"initial weights: took {len(self.taken)} of {whole} variables from {self.path}, {self.kind}"]
        for label, names in {
            "by the order of layers, since their numbers differ": [
                f"{one} = {self.taken[one]}" for one in self.by_rank
            ],
            "a part of": self.sliced,
            "left new for their shape": self.skipped,
            "left new, since they are not chosen": self.new,
            "not used of the file": self.unused,
        }.items():
            parts += [f"  {label}: {_listed(names)}"] if names else []
        return "\n".join(parts)


def load_initial_weights(model: Any, given: str | Sequence[InitCheckpointConfig]) -> list[LoadedFile]:
    """Loads weights of `model` from one or more files, and logs what it took. Runs eagerly, in strategy scope.

    Args:
      model: A built model of Keras 3 or tf_keras, or a tf.Module.
      given: The path of a checkpoint that holds all weights, or sections that say what each file gives. They are
        applied in order, so that a later one replaces the values of an earlier one.

    Returns:
      What was loaded, one entry for each file.

    Raises:
      UsageError: when there is no such file, a pattern matches nothing, or a variable is missing or has another shape.
        The model is then unchanged.
      StorageError: when a file is damaged.
    """
    if isinstance(given, str):
        path = _found(given, _OPTION)
        file = open_weights(path)
        if _is_ours(model, file):
            loaded = [_load_whole(model, file)]
        else:
            loaded = _load_chosen(model, [(_OPTION, InitCheckpointConfig(path=path), file)])
    else:
        options = [(f"{_OPTION}.{number}", one) for number, one in enumerate(given)]
        loaded = _load_chosen(
            model, [(option, one, open_weights(_found(one.path, f"{option}.path"))) for option, one in options]
        )
    for one in loaded:
        _LOG.info("%s", one)
        _LOG.debug("variables of the model, and their names in %s: %s", one.path, one.taken)
    return loaded


def _found(path: str, option: str) -> str:
    try:
        return weights_at(path)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from error


def _is_ours(model: Any, file: WeightFile) -> bool:
    """Whether a checkpoint is of our form for this model, so that it is restored with all that the model adds to it."""
    if not isinstance(file, TensorFlowFile) or not file.has_graph:
        return False
    named = model_variables(model)
    names = named if named is not model else tf.train.TrackableView.children(model)
    saved, own = file.graph.children(file.graph.children(ROOT).get("model")), layer_names(model) or {}
    shared, by_number = saved.keys() & names.keys(), {own.get(name, name) for name in names}
    if file.layer_names is not None:
        return bool(shared) and all(file.layer_names.get(name, name) == own.get(name, name) for name in shared)
    # A file of `trainer-kit checkpoint rename` may have the user's numbers in place of ranks.
    return bool(shared) and (by_number == names.keys() or not by_number <= saved.keys())


def _load_whole(model: Any, file: WeightFile) -> LoadedFile:
    """Loads all variables of a model, and the items that it adds to checkpoints."""
    saved = saved_shapes(file.path, all_names=True)
    items = {
        name: _as_saved(name, item, saved) for name, item in (getattr(model, "checkpoint_items", None) or {}).items()
    }
    advice = (
        f"{_OPTION}: {file.path} does not hold all weights of this model; give a checkpoint of the same model, or "
        "build the model as that run built it. To take a part of the weights (an encoder's, for example), give a list "
        "of sections, [{path: ..., variables: [...], exclude: [...]}] (--allow_partial_restore is only for the "
        "checkpoints of this run)"
    )
    restore(tf.train.Checkpoint(model=model_variables(model), **items), file.path, whole=False, advice=advice)
    found = names_in_file(model, weights_by_path(model), file, None)
    return LoadedFile(file.path, file.kind, found.names, found.by_rank, unused=_unused(file, set(found.names.values())))


def _as_saved(name: str, item: Any, saved: Mapping[str, Any]) -> Any:
    """Returns the variables of an item by name, or the item itself if none of these names was saved.

    Earlier versions and other programs saved Keras 3 objects as TensorFlow tracks them.
    """
    named = item_variables(item)
    wanted = wanted_shapes({name: named})
    return item if wanted and not wanted.keys() & saved.keys() else named


def _load_chosen(model: Any, sources: Sequence[tuple[str, InitCheckpointConfig, WeightFile]]) -> list[LoadedFile]:
    """Loads the chosen variables of each file; checks all files before it changes the first variable."""
    weights = weights_by_path(model)
    planned = [_plan(model, weights, *source) for source in sources]
    for loaded, (_, _, file) in zip(planned, sources, strict=True):
        for path, name in loaded.taken.items():
            _assign(weights[path], file.read(name), path in loaded.sliced)
    return planned


def _plan(
    model: Any, weights: Mapping[str, tf.Variable], option: str, config: InitCheckpointConfig, file: WeightFile
) -> LoadedFile:
    """Returns what a file gives to a model, without loading it."""
    check_patterns(f"{option}.variables", config.variables, list(weights))
    check_patterns(f"{option}.exclude", config.exclude, list(weights))
    new_names = replaced_names(file, config.rename.items(), f"{option}.rename") if config.rename else None
    chosen = {path: variable for path, variable in weights.items() if _is_chosen(path, config)}
    found = names_in_file(model, chosen, file, new_names)
    loaded, rows = LoadedFile(file.path, file.kind), list[tuple[str, str, Any, Any]]()
    for path, variable in chosen.items():
        here, name = tuple(variable.shape), found.names.get(path)
        if name is None:
            rows.append((path, "missing in the file", None, here))
        elif (saved := file.shapes[name]) == here:
            loaded.taken[path] = name
        elif config.other_shapes == "skip":
            loaded.skipped.append(path)
        elif config.other_shapes == "slice" and len(saved) == len(here):
            loaded.taken[path] = name
            loaded.sliced.append(path)
        else:
            rows.append((path, "another shape", saved, here))
    if rows or not loaded.taken:
        raise UsageError(_does_not_fit(option, rows, len(chosen), file))
    loaded.by_rank.extend(path for path in found.by_rank if path in loaded.taken)
    loaded.new.extend(path for path in weights if path not in chosen)
    loaded.unused.extend(_unused(file, set(found.names.values())))
    return loaded


def _unused(file: WeightFile, used: set[str]) -> list[str]:
    """Returns the names in a file that are not used; of a checkpoint of a run, those of its model."""
    model = [name for name in file.shapes if name.startswith(MODEL)]
    return sorted(set(model or file.shapes) - used)


def _is_chosen(path: str, config: InitCheckpointConfig) -> bool:
    wanted = not config.variables or any(re.search(pattern, path) for pattern in config.variables)
    return wanted and not any(re.search(pattern, path) for pattern in config.exclude)


def _does_not_fit(option: str, rows: Sequence[tuple[str, str, Any, Any]], chosen: int, file: WeightFile) -> str:
    if not chosen:
        return f"{option}: variables and exclude choose no variable; change the patterns"
    if not rows:
        return (
            f"{option}: each of the {chosen} chosen variables has another shape in {file.path}, {file.kind}, and "
            "other_shapes is skip, so nothing would be loaded; choose other variables, or set other_shapes to slice"
        )
    text = differences_table(sorted(rows, key=lambda row: row[0].rpartition("/")))
    if option == _OPTION:
        advice = "to take a part, give a list of sections, [{path: ..., variables: [...], exclude: [...]}]"
    else:
        advice = "name them in exclude, say in rename how the file calls them, or set other_shapes to skip or slice"
    names = ", ".join(list(file.shapes)[:_LISTED])
    return (
        f"{option}: {len(rows)} of the {chosen} chosen variables cannot be loaded from {file.path}, {file.kind}; "
        f"{advice}; no weight was changed. Names in the file: {names}{', ...' if len(file.shapes) > _LISTED else ''}\n"
        f"{text}"
    )


def _assign(variable: tf.Variable, value: Any, sliced: bool) -> None:
    if sliced:
        whole = variable.numpy()
        both = tuple(slice(min(sizes)) for sizes in zip(whole.shape, value.shape, strict=True))
        whole[both] = value[both]
        value = whole
    variable.assign(tf.cast(value, variable.dtype))


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
