"""Loads models and weights from runs and from other files: `load_model` and `load_weights`."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph, parse_attribute_path
from trainer_kit.checkpoints.state.strict_restore import format_differences
from trainer_kit.checkpoints.weight_files.keras_file import is_keras_file
from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.checkpoint_selection import resolve_weights_path
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.serving.keras_files import load_keras_file
from trainer_kit.serving.run_checkpoint import resolve_run_checkpoint
from trainer_kit.serving.run_config_loading import read_run_config, resolve_run_dir
from trainer_kit.training.checks.batch_spec import is_built
from trainer_kit.training.initial_weights.variable_matching import Match, find_best_match
from trainer_kit.training.trainer_creation import get_trainer_class
from trainer_kit.typing import Model, TaskLike

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class LoadedWeights:
    """The result of `load_weights`.

    Attributes:
      path: The path of the file, or the prefix of the checkpoint.
      part: The attribute of the checkpoint that contains the model. "" is the root, or a Keras
        file.
      variables: The number of loaded variables.
      parameters: The number of values in them.
      averaged: Whether moving averages were loaded instead of weights.
      unused: The names of other variables in a TensorFlow checkpoint. Always empty for a Keras
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
        part = f" ({self.part})" if self.part else ""
        text = (
            f"loaded {kind}{self.variables} variables ({self.parameters:,} parameters)"
            f" from {self.path}{part}"
        )
        if not self.unused:
            return text
        counts = collections.Counter(name.partition("/")[0] for name in self.unused)
        sections = [f"{section} ({count})" for section, count in counts.items()]
        unused = ", ".join(sections)
        return f"{text}; not used: {unused}"


@dataclass(frozen=True)
class LoadedRun:
    """A run whose task and model are built, with the weights of a checkpoint.

    Attributes:
      folder: The folder of the run.
      config: The config of the run, on one device.
      task: The task.
      model: The model, with the weights that the run evaluates.
      checkpoint: The prefix of the checkpoint.
      step: The step of the checkpoint.
    """

    folder: Path
    config: ExperimentConfig
    task: TaskLike
    model: Any
    checkpoint: str
    step: int


def open_run(
    run_dir: str | os.PathLike[str],
    which: str | int = "best",
    import_modules: str | Sequence[str] | Literal[False] = (),
    weights: str = "",
) -> LoadedRun:
    """Builds the task and the model of a run, and loads the weights. See `load_model`."""
    folder = resolve_run_dir(run_dir)
    config = read_run_config(folder, import_modules)
    trainer_class = get_trainer_class(config)
    if advice := getattr(trainer_class, "loading_advice", ""):
        raise UsageError(f"{folder}: {advice}")

    def find_checkpoint() -> str:
        return resolve_run_checkpoint(folder, which, config.trainer)

    # A missing checkpoint is reported before the model is built.
    find_checkpoint()
    with precision_scope(config.runtime):
        task_class = lookup_task_class(config.task)
        task = task_class(config.task, logging_dir=os.fspath(folder))
        trainer = trainer_class.create(config, task, False, True)

    prefix, _ = _load_with_retry(find_checkpoint, trainer.state.restore_weights)
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
    for part in tf.train.TrackableView(trainer.model).descendants():
        if isinstance(part, keras.layers.Normalization):
            # It computes with copies of its variables.
            part.finalize_state()
    step = int(trainer.global_step.numpy())
    return LoadedRun(
        folder=folder,
        config=config,
        task=task,
        model=trainer.model,
        checkpoint=prefix,
        step=step,
    )


def load_model(
    run_dir: str | os.PathLike[str],
    which: str | int = "best",
    import_modules: str | Sequence[str] | Literal[False] = (),
    weights: str = "",
) -> Any:
    """Returns the model of a run with the weights that the run evaluates.

    These are the moving average, if the run keeps one. The run's own task builds the model from
    params.yaml and manifest.json. Without an experiment Keras builds it from model.json, in safe
    mode. This trains nothing and writes nothing into the folder. The run may continue meanwhile.
    Runs eagerly, outside of a strategy.

    Args:
      run_dir: The folder of the run.
      which: "best", "best:NAME" for one of trainer.best_checkpoints, "latest", a step, as a number
        or as "ckpt-<step>", or a path.
      import_modules: The modules to import before the experiment is looked up, or one: dotted names
        or paths of .py files. Empty: those of the run's command, seen from the working directory,
        which a line names. False: nothing that the run names is imported, and a run that needs it
        is refused.
      weights: "average", "weights" (the trained ones) or one of `ema.more_decays`, for a checkpoint
        that contains all of these. "": the first of `ema.evaluate`, or, of best weights, those that
        were the best.

    Raises:
      UsageError: when the run, the checkpoint or the average does not exist, or the experiment is
        not known.
      StorageError: when the files are damaged.
    """
    run = open_run(run_dir, which, import_modules, weights)
    class_name = type(run.model).__name__
    print(f"loaded {class_name} from {run.checkpoint}")
    return run.model


def load_weights(
    model: Model, path: str | os.PathLike[str], part: str | None = None, averaged: bool | str = True
) -> LoadedWeights:
    """Loads weights of any program into a model; prints a summary and returns it.

    All variables of the model get their values, or, after an error, none. A value is converted to
    the dtype of its variable. Runs eagerly, in cross-replica context.

    Args:
      model: A built Keras 3 model, tf_keras model or tf.Module.
      path: The prefix of a TensorFlow checkpoint of trainer_kit or any other program. Or a folder
        of checkpoints, of which the newest is loaded, or the best in a folder of best weights. Or a
        run's folder. Or a `.weights.h5`, `.h5` or `.keras` file.
      part: The attributes that lead to the model in the checkpoint, such as "net" in
        `tf.train.Checkpoint(net=model)`. None searches for the model.
      averaged: Whether to load the moving averages of a run instead of its weights, if the
        checkpoint contains averages. Or the name of one average, "average" or one of
        `ema.more_decays`.

    Raises:
      UsageError: when the file or the average does not exist, or variables of the model are missing
        or have another shape. A table lists all. The model is unchanged.
      StorageError: when the file is damaged.
    """
    check_built(model)
    source = os.fspath(path)
    if is_keras_file(source):
        variable_count, parameter_count = load_keras_file(model, source)
        loaded = LoadedWeights(source, "", variable_count, parameter_count)
    else:
        _, loaded = _load_with_retry(
            lambda: resolve_weights_path(source),
            lambda prefix: _load_checkpoint(model, prefix, part, averaged),
        )
    print(loaded)
    return loaded


def check_built(model: Model) -> None:
    """Raises UsageError unless `model` has created its variables."""
    try:
        # A tf.Module has no `built`.
        built = bool(model.variables) and (getattr(model, "built", True) or is_built(model))
    except ValueError:
        # A Sequential of Keras 2 without variables raises it.
        built = False
    except AttributeError:
        raise UsageError(f"model: {model!r} is not a model: it has no variables") from None
    if not built:
        raise UsageError(
            f"the model {type(model).__name__} has no variables yet; call it on a batch first, or"
            " build it with model.build(input_shape)"
        )


def _load_checkpoint(
    model: Model, prefix: str, part: str | None, averaged: bool | str
) -> LoadedWeights:
    graph = CheckpointGraph(prefix)
    match = find_best_match(model, graph, part, averaged)
    used_keys = {key for _, key in match.pairs}
    _check_match(model, graph, match, used_keys)

    # All values are read before the first is assigned.
    values = [graph.value(key) for _, key in match.pairs]
    for (variable, _), value in zip(match.pairs, values, strict=True):
        converted_value = tf.cast(value, variable.dtype)
        variable.assign(converted_value)

    unused_keys = graph.shapes.keys() - used_keys
    unused = sorted(map(parse_attribute_path, unused_keys))
    return LoadedWeights(
        path=prefix,
        part=match.part,
        variables=len(values),
        parameters=sum(int(tf.size(value)) for value in values),
        averaged=match.is_averaged,
        unused=tuple(unused),
    )


def _check_match(
    model: Model, graph: CheckpointGraph, variable_match: Match, used_keys: set[str]
) -> None:
    if variable_match.misfits:
        reason = "nothing fits"
        if variable_match.pairs:
            part = f"part {variable_match.part!r}" if variable_match.part else "root"
            count = len(variable_match.misfits)
            reason = f"its {part}, which fits best: {count} variables do not fit"
        # Rows of one layer follow one another.
        rows = sorted(variable_match.misfits, key=lambda row: row[0].rpartition("/"))
        table = format_differences(rows)
        raise UsageError(
            f"{graph.prefix} does not fit the model {type(model).__name__} ({reason});"
            " build the model as it was when the checkpoint was saved;"
            f" no weight was changed:\n{table}"
        )

    # A layer has both attributes. Optimizers and metrics do not.
    unbuilt = []
    for part in tf.train.TrackableView(model).descendants():
        is_layer = part is not model and hasattr(part, "call") and hasattr(part, "built")
        if is_layer and not part.built:
            unbuilt.append(type(part).__name__)

    unused_keys = graph.collect_keys_below(variable_match.node) - used_keys
    unused = sorted(map(parse_attribute_path, unused_keys))

    # After averages were loaded, the unused variables are the weights themselves.
    if unbuilt and unused and not variable_match.is_averaged:
        raise UsageError(
            f"{graph.prefix} holds {unused[0]} and the like, for which the model has no variable,"
            f" and its layer {unbuilt[0]} is not built; call the model on a batch first;"
            " no weight was changed"
        )


def _load_with_retry(
    find_checkpoint: Callable[[], str], load_checkpoint: Callable[[str], _Loaded]
) -> tuple[str, _Loaded]:
    """Loads the checkpoint that `find_checkpoint` returns.

    Tries again if the run has replaced the checkpoint meanwhile.
    """
    prefix = find_checkpoint()
    while True:
        try:
            return prefix, load_checkpoint(prefix)
        except StorageError:
            failed_prefix = prefix
            prefix = find_checkpoint()
            if prefix == failed_prefix:
                raise
