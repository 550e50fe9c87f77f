"""Loads models and weights from runs and from other files: `load_model` and `load_weights`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph, parse_attribute_path
from trainer_kit.checkpoints.state.strict_restore import format_differences
from trainer_kit.checkpoints.weight_files.keras_file import is_keras_file
from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.checkpoint_selection import resolve_weights_path
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.serving.keras_files import load_keras_file
from trainer_kit.serving.run_checkpoint import resolve_run_checkpoint
from trainer_kit.serving.run_config_loading import read_run_config, resolve_run_dir
from trainer_kit.training.checks.batch_spec import is_built
from trainer_kit.training.initial_weights.variable_matching import Match, find_best_match
from trainer_kit.training.trainer_creation import get_trainer_class

_MAX_LISTED_NAMES = 3  # names in a report
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class LoadedWeights:
    """The result of `load_weights`.

    Attributes:
      path: The path of the file, or the prefix of the checkpoint.
      part: The attribute of the checkpoint that holds the model; "" is the root, or a Keras file.
      variables: The number of loaded variables.
      parameters: The number of values in them.
      averaged: Whether moving averages were loaded instead of weights.
      unused: The names of other variables in a TensorFlow checkpoint; always empty for a Keras
        file.
    """

    path: str
    part: str
    variables: int
    parameters: int
    averaged: bool = False
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "moving averages of the weights, " if self.averaged else ""
        where = f" ({self.part})" if self.part else ""
        text = (
            f"loaded {kind}{self.variables} variables ({self.parameters:,} parameters) from"
            f" {self.path}{where}"
        )
        return f"{text}; not used: {_format_by_section(self.unused)}" if self.unused else text


def load_model(
    run_dir: str | os.PathLike[str],
    which: str | int = "best",
    import_modules: str | Sequence[str] = (),
    weights: str = "",
) -> Any:
    """Returns the model of a run with the weights that the run evaluates: their moving average, if it keeps one.

    The run's own task builds the model from params.yaml and manifest.json. This trains nothing and
    writes nothing into the folder; the run may continue meanwhile. Runs eagerly, outside of a
    strategy.

    Args:
      run_dir: The folder of the run.
      which: "best", "best:NAME" for one of trainer.best_checkpoints, "latest", a step, as a number
        or as "ckpt-<step>", or a path.
      import_modules: The modules to import before the experiment is looked up, or one: dotted names
        or paths of .py files. Empty: those of the run's command, seen from the working directory.
      weights: "average", "weights" (the trained ones) or one of `ema.more_decays`, for a checkpoint
        that holds them all; "": the first of `ema.evaluate`, or, of best weights, those that were
        the best.

    Raises:
      UsageError: when there is no such run, checkpoint or average, or the experiment is not known.
      StorageError: when the files are damaged.
    """
    folder = resolve_run_dir(run_dir)
    config = read_run_config(folder, import_modules, "import_modules")
    find = lambda: resolve_run_checkpoint(folder, which, config.trainer, resolve_weights_path)  # noqa: E731
    find()  # a miss is reported before the model is built
    with precision_scope(config.runtime):
        task = lookup_task_class(config.task)(config.task, logging_dir=os.fspath(folder))
        trainer = get_trainer_class(config).create(config, task, False, True)
    prefix, _ = _load_with_retry(find, trainer.state.restore_weights)
    if weights and not trainer.state.has_averages(prefix):
        raise UsageError(
            f"weights: {prefix} holds one kind of weights, those that were evaluated; leave"
            f' weights={weights!r} out, or load a checkpoint of the run, such as which="latest"'
        )
    variables = list(trainer.model.variables)
    with trainer.use_weights(weights):
        values = [variable.numpy() for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    print(f"loaded {type(trainer.model).__name__} from {prefix}")
    return trainer.model


def load_weights(
    model: Any, path: str | os.PathLike[str], part: str | None = None, averaged: bool | str = True
) -> LoadedWeights:
    """Loads weights of any program into a model; prints a summary and returns it.

    All variables of the model get their values, or, after an error, none. A value is converted to
    the dtype of its variable. Runs eagerly, in cross-replica context.

    Args:
      model: A built Keras 3 model, tf_keras model or tf.Module.
      path: The prefix of a TensorFlow checkpoint of trainer_kit or any other program; a folder of
        checkpoints, of which the newest is loaded, or the best in a folder of best weights; a run's
        folder; or a `.weights.h5`, `.h5` or `.keras` file.
      part: The attributes that lead to the model in the checkpoint, such as "net" in
        `tf.train.Checkpoint(net=model)`; None searches for the model.
      averaged: Whether to load the moving averages of a run instead of its weights, if the
        checkpoint holds them; or the name of one average, "average" or one of `ema.more_decays`.

    Raises:
      UsageError: when there is no such file or average, or variables of the model are missing or
        have another shape; a table lists all. The model is unchanged.
      StorageError: when the file is damaged.
    """
    check_built(model)
    place = os.fspath(path)
    if is_keras_file(place):
        loaded = LoadedWeights(place, "", *load_keras_file(model, place))
    else:
        _, loaded = _load_with_retry(
            lambda: resolve_weights_path(place),
            lambda prefix: _load_checkpoint(model, prefix, part, averaged),
        )
    print(loaded)
    return loaded


def check_built(model: Any) -> None:
    """Raises UsageError unless `model` has created its variables."""
    try:
        built = bool(model.variables) and (getattr(model, "built", True) or is_built(model))
    except ValueError:  # raised by a Sequential of Keras 2 without variables
        built = False
    except AttributeError:
        raise UsageError(f"model: {model!r} is not a model: it has no variables") from None
    if not built:
        raise UsageError(
            f"the model {type(model).__name__} has no variables yet; call it on a batch first, or"
            " build it with model.build(input_shape)"
        )


def _load_checkpoint(
    model: Any, prefix: str, part: str | None, averaged: bool | str
) -> LoadedWeights:
    graph = CheckpointGraph(prefix)
    found = find_best_match(model, graph, part, averaged)
    used = {key for _, key in found.pairs}
    _check_match(model, graph, found, used)
    values = [
        graph.value(key) for _, key in found.pairs
    ]  # reads all values before it assigns the first
    for (variable, _), value in zip(found.pairs, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    unused = tuple(sorted(parse_attribute_path(key) for key in graph.shapes.keys() - used))
    parameters = sum(int(tf.size(value)) for value in values)
    return LoadedWeights(prefix, found.part, len(values), parameters, found.is_averaged, unused)


def _check_match(
    model: Any, graph: CheckpointGraph, variable_match: Match, used_keys: set[str]
) -> None:
    if variable_match.misfits:
        part = (
            f"its part {variable_match.part!r}, which fits best"
            if variable_match.part
            else "its root, which fits best"
        )
        fits = (
            f"{part}: {len(variable_match.misfits)} variables do not fit"
            if variable_match.pairs
            else "nothing fits"
        )
        rows = sorted(variable_match.misfits, key=lambda row: row[0].rpartition("/"))
        raise UsageError(
            f"{graph.prefix} does not fit the model {type(model).__name__} ({fits}); build the"
            " model as it was when the checkpoint was saved; no weight was"
            f" changed:\n{format_differences(rows)}"
        )
    parts = {
        id(one): one for one in tf.train.TrackableView(model).descendants() if one is not model
    }.values()
    layers = [
        one for one in parts if hasattr(one, "call") and hasattr(one, "built")
    ]  # no optimizers, no metrics
    unbuilt = [type(one).__name__ for one in layers if not one.built]
    left = sorted(
        parse_attribute_path(key)
        for key in graph.collect_keys_below(variable_match.node) - used_keys
    )
    if (
        unbuilt and left and not variable_match.is_averaged
    ):  # after averages were loaded, the rest are the weights themselves
        raise UsageError(
            f"{graph.prefix} holds {left[0]} and the like, for which the model has no variable, and"
            f" its layer {unbuilt[0]} is not built; call the model on a batch first; no weight was"
            " changed"
        )


def _load_with_retry(
    find_checkpoint: Callable[[], str], load_checkpoint: Callable[[str], _Loaded]
) -> tuple[str, _Loaded]:
    """Loads the checkpoint that `find_checkpoint` returns; tries again if the run has replaced it meanwhile."""
    prefix = find_checkpoint()
    while True:
        try:
            return prefix, load_checkpoint(prefix)
        except StorageError:
            before, prefix = prefix, find_checkpoint()
            if prefix == before:
                raise


def _format_by_section(names: Sequence[str]) -> str:
    """Returns the names as text, grouped by their first part: "optimizer (9), global_step"."""
    sections: dict[str, list[str]] = {}
    for name in names:
        sections.setdefault(name.split("/")[0], []).append(name)
    single = len(sections) == 1 and len(names) > 1
    listed = [f"{name} ({len(of)})" if of != [name] else name for name, of in sections.items()]
    more = (
        f": {', '.join(names[:_MAX_LISTED_NAMES])}{' ...' if len(names) > _MAX_LISTED_NAMES else ''}"
        if single
        else ""
    )
    return ", ".join(listed) + more
