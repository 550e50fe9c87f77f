"""Defines the contents of a checkpoint and restores them strictly.

The root keys are TF Model Garden's: global_step, model, optimizer. Further keys are:

- `average`, the moving average of the weights
- `more_averages`, those with other decays, by name
- `run_state` and `run_arrays` (python_state.py, which also restores the arrays)
- `random` and `task`, state that the model does not list (random_state.py)
- `step_state`, other state that the training step changes (step_state.py, which also restores it)
- the items that the model adds by `checkpoint_items`
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from trainer_kit.checkpoints.state.keras_structure import build_model_trackable
from trainer_kit.checkpoints.state.object_graph import (
    CheckpointGraph,
    create_read_error,
    find_missing_objects,
    parse_attribute_path,
)
from trainer_kit.checkpoints.state.python_state import ARRAYS
from trainer_kit.checkpoints.state.step_state import STEP_STATE
from trainer_kit.checkpoints.state.variable_names import (
    item_variables,
    model_variables,
    optimizer_variables,
)
from trainer_kit.errors import UsageError
from trainer_kit.typing import Model, Optimizers, Variable

Shape: TypeAlias = tuple[int, ...]
# A row of a table: the name, the difference, the shape in the file and the shape in the run
DifferenceRow: TypeAlias = tuple[str, str, Shape | None, Shape | None]
_RESTORED_SEPARATELY = (f"{STEP_STATE}/", f"{ARRAYS}/")
# The parts of a name: section, optimizer of several, variable
NAME_DEPTH = 3
# The sections that files of TF Model Garden and best checkpoints lack
OMITTABLE_SECTIONS = (
    "average",
    "more_averages",
    "run_state",
    "random",
    "task",
)
# The rows of a table of differences
ROWS = 20
_OTHER_DTYPE = re.compile(
    r"tensor_name = (\S+); expected dtype (\w+) does not equal original dtype (\w+)"
)
_LOG = logging.getLogger(__name__)


def create_training_checkpoint(
    *,
    global_step: tf.Variable,
    model: Model,
    optimizer: Optimizers | None = None,
    average: Mapping[str, tf.Variable] | None = None,
    more_averages: Mapping[str, Mapping[str, tf.Variable]] | None = None,
    trainable: Sequence[Variable] = (),
    **others: Any,
) -> tf.train.Checkpoint:
    """Returns the checkpoint of a run.

    Runs eagerly, in strategy scope, after the optimizer was built.

    Args:
      global_step: The step counter, an int64 scalar.
      model: A Keras 3 model, tf_keras model or tf.Module. Its `checkpoint_items`, a dict of
        trackables, is saved too.
      optimizer: A Keras 3 optimizer or a dict of them. None leaves it out, for evaluation.
      average: The moving average of the weights, by key (moving_average.average_keys). None leaves
        it out.
      more_averages: The moving averages with other decays, by name, each by key.
      trainable: The variables that count in the names of slots, if some were frozen. Empty means
        the model's trainable ones.
      **others: Further variables, or dicts of them by name. Those in OMITTABLE_SECTIONS may be
        missing in a file.
    """
    items: dict[str, Any] = {"global_step": global_step, "model": model_variables(model)}
    if optimizer is not None:
        items["optimizer"] = optimizer_variables(optimizer, model, trainable)
    if average is not None:
        items["average"] = dict(average)
    if more_averages:
        items["more_averages"] = {
            name: dict(variables) for name, variables in more_averages.items()
        }
    for name, item in others.items():
        # An empty dict leaves nothing in the file.
        if not isinstance(item, Mapping) or item:
            items[name] = item
    model_items = getattr(model, "checkpoint_items", None) or {}
    items.update(item_variables(model_items))
    return tf.train.Checkpoint(**items)


def create_weights_checkpoint(
    *, global_step: tf.Variable, model: Model, **items: Any
) -> tf.train.Checkpoint:
    """Returns the checkpoint of the weights alone, as the best checkpoint contains them.

    The file can be read by our names and, for a Keras 3 model, by
    `tf.train.Checkpoint(model=model)` as well. Use the result only for writing, since `restore`
    reads by our names. Runs eagerly, in cross-replica context.

    Args:
      global_step: The step counter, an int64 scalar.
      model: A Keras 3 model, tf_keras model or tf.Module.
      **items: Further items by name.
    """
    checkpoint = create_training_checkpoint(global_step=global_step, model=model, **items)
    sections = _items(checkpoint)
    if STEP_STATE in items:
        sections[STEP_STATE] = items[STEP_STATE]
    sections["model"] = build_model_trackable(model)
    return tf.train.Checkpoint(**sections)


def restore(
    checkpoint: tf.train.Checkpoint,
    path: str,
    *,
    strict: bool,
    allow_partial: bool = False,
    optional_sections: Collection[str] = (),
) -> None:
    """Restores `checkpoint` from `path`, strictly. Runs eagerly, in strategy scope.

    Args:
      checkpoint: The result of `create_training_checkpoint`.
      path: The prefix of the files, `model_dir/ckpt-<step>`.
      strict: Whether to refuse a file with variables that the run does not have. False for
        evaluation.
      allow_partial: Whether to restore what fits by name and shape, and log what does not.
      optional_sections: The sections that are restored as far as both sides have them, including
        variables created later.

    Raises:
      UsageError: when a variable is missing, differs in shape or dtype or, if `strict`, is not in
        the run. The message lists all.
      StorageError: when the files are missing or damaged.
    """
    try:
        graph = CheckpointGraph(path)
        saved_shapes = {
            name: shape
            for name, shape in graph.shapes_by_name(NAME_DEPTH).items()
            if not name.startswith(_RESTORED_SEPARATELY)
        }
        # Who takes a part has to see all of the rest.
        max_rows = None if allow_partial else ROWS
        text = _describe_differences(checkpoint, saved_shapes, strict, optional_sections, max_rows)
        # TensorFlow would say the same, later and at length.
        if text and not allow_partial:
            raise _create_mismatch_error(path, text, allow_partial)

        if optional_sections:
            items = _items(checkpoint)
            # These are read first and without a check, and the rest is checked below.
            saved_sections = _sections(saved_shapes)
            required = {}
            existing = {}
            missing = []
            for name, item in items.items():
                if name not in optional_sections:
                    required[name] = item
                elif name in saved_sections:
                    existing[name] = item
                else:
                    missing.append(name)
            if missing:
                names = ", ".join(sorted(missing))
                _LOG.warning("%s holds no %s: it keeps its initial value", path, names)

            status = tf.train.Checkpoint(**existing).read(path)
            status.expect_partial()
            checkpoint = tf.train.Checkpoint(**required)

        if text:
            _LOG.warning(
                "%s is restored in part; "
                "the following keep their initial value or are not used:\n%s",
                path,
                text,
            )
            matching_items = _select_matching_items(checkpoint, saved_shapes)
            target = tf.train.Checkpoint(**matching_items)
            target.read(path).expect_partial()
            return

        saved_items = _without_absent(checkpoint, saved_shapes, strict)
        target = tf.train.Checkpoint(**saved_items)
        if strict and not optional_sections and not graph.get_section_keys(STEP_STATE):
            # Arrays are read later, and count as consumed here.
            arrays = {}
            for name, key in graph.get_section_keys(ARRAYS).items():
                array = graph.value(key)
                arrays[name] = tf.Variable(array)
            if arrays:
                setattr(target, ARRAYS, arrays)
            status = target.restore(path)
            _assert_consumed(status, target, graph)
        else:
            # `read` does not ask for the counter of saves, which the best checkpoint lacks.
            status = target.read(path)
            status.expect_partial()
            status.assert_existing_objects_matched()
    except (AssertionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        # TensorFlow lists variables with all of their values.
        text = re.sub(r", numpy=.*?>(?=, <|\])", ">", str(error), flags=re.DOTALL)
        raise _create_mismatch_error(path, text, allow_partial) from error
    except (tf.errors.OpError, IndexError) as error:
        rows: list[DifferenceRow] = []
        for key, dtype, saved_dtype in _OTHER_DTYPE.findall(str(error)):
            name = parse_attribute_path(key)
            rows.append((name, f"{saved_dtype} saved, {dtype} here", None, None))
        if rows:
            table = format_differences(rows)
            raise _create_mismatch_error(path, table, True) from error
        raise create_read_error(path, error) from error


def _create_mismatch_error(path: str, text: str, allow_partial: bool) -> UsageError:
    """Returns the error for a checkpoint that does not fit, with a table of the differences."""
    folder = os.path.dirname(path)
    config_path = os.path.join(folder, "params.yaml")
    has_config = os.path.exists(config_path)
    config = f" ({config_path})" if has_config else ""
    alternative = ", or allow_partial_restore, which restores what fits"
    if allow_partial:
        alternative = " (a model of this kind cannot be restored in part)"
    return UsageError(
        f"{path} does not fit this run; "
        f"use the code and the config that it was saved with{config}, "
        f"another model_dir{alternative}:\n{text}"
    )


def _assert_consumed(status: Any, target: tf.train.Checkpoint, graph: CheckpointGraph) -> None:
    """Raises AssertionError unless the restore used all values.

    Variables that optimizers inside the model create later are excepted.
    """
    try:
        status.assert_consumed()
    except AssertionError:
        # Otherwise TensorFlow lists, later and at length, what our own message says.
        status.expect_partial()
        missing = find_missing_objects(graph, target)
        optimizer_paths = _select_optimizer_paths(missing)
        if not missing or len(optimizer_paths) < len(missing):
            raise
        status.assert_existing_objects_matched()


def find_uncreated_variables(
    checkpoint: tf.train.Checkpoint,
    graph: CheckpointGraph,
    optional_sections: Collection[str] = (),
) -> list[str]:
    """Returns the paths of saved variables that optimizers inside the model have not created yet.

    A tf_keras optimizer creates its slots in the first step, and TensorFlow restores each as it is
    created. So `restore` allows them to be missing, and `check_variables_created` checks afterwards
    that they were created. Runs eagerly.

    Args:
      checkpoint: The result of `create_training_checkpoint`.
      graph: What the files contain that it was restored from.
      optional_sections: See `restore`.
    """
    items = _items(checkpoint)
    required = {name: item for name, item in items.items() if name not in optional_sections}
    target = tf.train.Checkpoint(**required)
    missing = find_missing_objects(graph, target)
    optimizer_paths = _select_optimizer_paths(missing)
    return sorted(optimizer_paths)


def check_variables_created(
    checkpoint: tf.train.Checkpoint, path: str, optional_sections: Collection[str] = ()
) -> None:
    """Raises for paths that `find_uncreated_variables` still returns after the step was traced.

    It takes the same arguments and runs eagerly.

    Raises:
      UsageError: when optimizers inside the model lack saved variables.
      StorageError: when the files are gone or damaged.
    """
    names = find_uncreated_variables(checkpoint, CheckpointGraph(path), optional_sections)
    if names:
        rows = [(name, "not in this run", None, None) for name in names]
        raise _create_mismatch_error(path, format_differences(rows), allow_partial=True)


def _select_optimizer_paths(missing: Mapping[str, object]) -> list[str]:
    return [path for path, owner in missing.items() if hasattr(owner, "apply_gradients")]


def _describe_differences(
    checkpoint: tf.train.Checkpoint,
    saved: Mapping[str, Shape],
    strict: bool,
    optional_sections: Collection[str],
    max_rows: int | None,
) -> str:
    """Returns a table, by layer, of the differences between a file and this run.

    The table has at most `max_rows` rows. None means all. It is "" without differences.

    Models and optimizers of tf_keras, and tf.Module, are saved by structure, not by name, and are
    not compared.
    """
    saved = {
        name: shape for name, shape in saved.items() if name.split("/")[0] not in optional_sections
    }
    saved_items = _without_absent(checkpoint, saved, strict)
    items = {name: item for name, item in saved_items.items() if name not in optional_sections}
    run_shapes = collect_variable_shapes(items)

    rows: list[DifferenceRow] = []
    for name, run_shape in run_shapes.items():
        if name not in saved:
            rows.append((name, "missing in the checkpoint", None, run_shape))
        elif saved[name] != run_shape:
            rows.append((name, "another shape", saved[name], run_shape))
    if strict:
        by_structure = tuple(_saved_by_structure(items))
        for name, saved_shape in saved.items():
            is_named = not name.startswith(by_structure)
            if is_named and name not in run_shapes:
                rows.append((name, "not in this run", saved_shape, None))

    rows.sort(key=lambda row: row[0].rpartition("/"))
    return format_differences(rows, max_rows)


def _saved_by_structure(items: Mapping[str, object], path: str = "") -> Iterator[str]:
    """Yields the paths, which end with "/", of what is saved by structure.

    An example is each of several optimizers of tf_keras.
    """
    for name, item in items.items():
        if isinstance(item, Mapping):
            inner_path = f"{path}{name}/"
            yield from _saved_by_structure(item, inner_path)
        elif not isinstance(item, tf.Variable):
            yield f"{path}{name}/"


def format_differences(rows: Sequence[DifferenceRow], max_rows: int | None = ROWS) -> str:
    """Formats rows under a line for each layer.

    At most `max_rows` of them are shown. None means all.
    """
    lines: list[str] = []
    layer = None
    for name, difference, saved_shape, run_shape in rows[:max_rows]:
        parent, _, leaf = name.rpartition("/")
        if parent != layer:
            lines.append(f"  {parent or name}")
            layer = parent

        shapes = []
        if saved_shape is not None:
            shapes.append(f"{list(saved_shape)} saved")
        if run_shape is not None:
            shapes.append(f"{list(run_shape)} here")
        shape_text = ", ".join(shapes)
        lines.append(f"    {leaf:24} {difference:26} {shape_text}")

    if max_rows is not None and len(rows) > max_rows:
        omitted = len(rows) - max_rows
        lines.append(f"  ... and {omitted} more")
    return "\n".join(lines)


def _items(checkpoint: tf.train.Checkpoint) -> dict[str, Any]:
    excluded = ("save_counter", STEP_STATE, ARRAYS)
    return {
        name: item
        for name, item in vars(checkpoint).items()
        if not name.startswith("_") and name not in excluded
    }


def _sections(names: Iterable[str]) -> set[str]:
    return {name.split("/")[0] for name in names}


def _without_absent(
    checkpoint: tf.train.Checkpoint, saved: Mapping[str, Shape], strict: bool
) -> dict[str, Any]:
    """Returns the items of `checkpoint` without optional ones that the file does not contain."""
    sections = _sections(saved)
    # A best checkpoint lacks the optimizer.
    optional = OMITTABLE_SECTIONS if strict else (*OMITTABLE_SECTIONS, "optimizer")
    return {
        name: item
        for name, item in _items(checkpoint).items()
        if name in sections or name not in optional
    }


def _select_matching_items(
    checkpoint: tf.train.Checkpoint, saved: Mapping[str, Shape]
) -> dict[str, Any]:
    """Returns the items of `checkpoint` without named variables that do not match the file.

    These are missing or have another shape in the file.
    """

    def select(name: str, item: object) -> object:
        if isinstance(item, Mapping):
            children = {}
            for key, value in item.items():
                child = select(f"{name}/{key}", value)
                if child is not None:
                    children[key] = child
            return children
        if isinstance(item, tf.Variable):
            shape = tuple(item.shape)
            if saved.get(name) == shape:
                return item
            return None
        return item

    matching_items = {}
    for name, item in _items(checkpoint).items():
        matching_item = select(name, item)
        if matching_item is not None:
            matching_items[name] = matching_item
    return matching_items


def collect_variable_shapes(items: Mapping[str, object]) -> dict[str, Shape]:
    """Returns the shapes, by name, of what a checkpoint of named variables would save."""
    shapes: dict[str, Shape] = {}

    def collect(name: str, child: object) -> None:
        if isinstance(child, tf.Variable):
            shapes[name] = tuple(child.shape)
        elif isinstance(child, Mapping):
            for key, value in child.items():
                collect(f"{name}/{key}", value)

    for section, child in items.items():
        collect(section, child)
    return shapes
