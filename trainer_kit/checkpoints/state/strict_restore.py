"""Defines the contents of a checkpoint and restores them strictly.

The root keys are TF Model Garden's: global_step, model, optimizer. Further keys are `average`, the
moving average of the weights; `more_averages`, those with other decays, by name; `run_state` and
`run_arrays` (python_state.py, which also restores the arrays); `random` and `task`, state that the
model does not list (random_state.py); `step_state`, other state that the training step changes
(step_state.py, which also restores it); and the items that the model adds by `checkpoint_items`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.keras_structure import build_model_trackable
from trainer_kit.checkpoints.state.object_graph import (
    CheckpointGraph,
    create_read_error,
    find_missing_objects,
    parse_attribute_path,
)
from trainer_kit.checkpoints.state.python_state import ARRAYS
from trainer_kit.checkpoints.state.step_state import STEP_STATE as STEP_STATE
from trainer_kit.checkpoints.state.variable_names import (
    item_variables,
    model_variables,
    optimizer_variables,
)
from trainer_kit.errors import UsageError

_RESTORED_SEPARATELY = (f"{STEP_STATE}/", f"{ARRAYS}/")
NAME_DEPTH = 3  # of names: section, optimizer of several, variable
OMITTABLE_SECTIONS = (
    "average",
    "more_averages",
    "run_state",
    "random",
    "task",
)  # what files of TF Model Garden and best checkpoints lack
ROWS = 20  # of a table of differences
_OTHER_DTYPE = re.compile(
    r"tensor_name = (\S+); expected dtype (\w+) does not equal original dtype (\w+)"
)
_LOG = logging.getLogger(__name__)


def create_training_checkpoint(
    *,
    global_step: tf.Variable,
    model: Any,
    optimizer: Any = None,
    average: Mapping[str, tf.Variable] | None = None,
    more_averages: Mapping[str, Mapping[str, tf.Variable]] | None = None,
    trainable: Sequence[Any] = (),
    **others: Any,
) -> tf.train.Checkpoint:
    """Returns the checkpoint of a run. Runs eagerly, in strategy scope, after the optimizer was built.

    Args:
      global_step: The step counter, an int64 scalar.
      model: A Keras 3 model, tf_keras model or tf.Module; its `checkpoint_items`, a dict of
        trackables, is saved too.
      optimizer: A Keras 3 optimizer or a dict of them; None leaves it out, for evaluation.
      average: The moving average of the weights, by key (moving_average.average_keys); None leaves
        it out.
      more_averages: The moving averages with other decays, by name, each by key.
      trainable: The variables that count in the names of slots, if some were frozen; empty: the
        model's trainable ones.
      **others: Further variables, or dicts of them by name; those in OPTIONAL may be missing in a
        file.
    """
    items: dict[str, Any] = {"global_step": global_step, "model": model_variables(model)}
    if optimizer is not None:
        items["optimizer"] = optimizer_variables(optimizer, model, trainable)
    if average is not None:
        items["average"] = dict(average)
    if more_averages:
        items["more_averages"] = {name: dict(one) for name, one in more_averages.items()}
    items.update(
        {name: item for name, item in others.items() if not isinstance(item, Mapping) or item}
    )
    items.update(item_variables(getattr(model, "checkpoint_items", None) or {}))
    return tf.train.Checkpoint(**items)


def create_weights_checkpoint(
    *, global_step: tf.Variable, model: Any, **items: Any
) -> tf.train.Checkpoint:
    """Returns the checkpoint of the weights alone, as the best checkpoint holds them, with further items by name.

    The file can be read by our names and, for a Keras 3 model, by
    `tf.train.Checkpoint(model=model)` as well. Use the result only for writing: `restore` reads by
    our names.
    """
    parts = _items(create_training_checkpoint(global_step=global_step, model=model, **items))
    own = {STEP_STATE: items[STEP_STATE]} if STEP_STATE in items else {}
    return tf.train.Checkpoint(**{**parts, **own, "model": build_model_trackable(model)})


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
      checkpoint: The result of training_checkpoint.
      path: The prefix of the files, `model_dir/ckpt-<step>`.
      strict: Whether to refuse a file with variables that the run does not have; False for
        evaluation.
      allow_partial: Whether to restore what fits by name and shape, and log what does not.
      optional_sections: The sections that are restored as far as both sides have them, including
        variables created later.

    Raises:
      UsageError: when a variable is missing, differs in shape or dtype or, if `strict`, is not in
        the run; lists all.
      StorageError: when the files are missing or damaged.
    """
    try:
        graph = CheckpointGraph(path)
        saved = graph.shapes_by_name(NAME_DEPTH)
        saved = {
            name: shape
            for name, shape in saved.items()
            if not name.startswith(_RESTORED_SEPARATELY)
        }
        most = None if allow_partial else ROWS  # who takes a part has to see all of the rest
        text = _describe_differences(checkpoint, saved, strict, optional_sections, most)
        if text and not allow_partial:  # TensorFlow would say the same, later and at length
            raise _create_mismatch_error(path, text, allow_partial)

        if optional_sections:
            items = _items(checkpoint)
            optional = {name: item for name, item in items.items() if name in optional_sections}
            missing = sorted(optional.keys() - _sections(saved))
            if missing:
                _LOG.warning("%s holds no %s: it keeps its initial value", path, ", ".join(missing))
            existing = {name: item for name, item in optional.items() if name not in missing}
            tf.train.Checkpoint(**existing).read(path).expect_partial()
            checkpoint = tf.train.Checkpoint(
                **{name: item for name, item in items.items() if name not in optional_sections}
            )

        if text:
            _LOG.warning(
                "%s is restored in part; the following keep their initial value or are not"
                " used:\n%s",
                path,
                text,
            )
            tf.train.Checkpoint(**_select_matching_items(checkpoint, saved)).read(
                path
            ).expect_partial()
            return

        target = tf.train.Checkpoint(**_without_absent(checkpoint, saved, strict))
        if strict and not optional_sections and not graph.get_section_keys(STEP_STATE):
            if arrays := graph.get_section_keys(
                ARRAYS
            ):  # they are read later, and count as consumed here
                setattr(
                    target,
                    ARRAYS,
                    {name: tf.Variable(graph.value(key)) for name, key in arrays.items()},
                )
            _assert_consumed(target.restore(path), target, graph)
        # `read` does not ask for the counter of saves, which the best checkpoint does not hold
        else:
            target.read(path).expect_partial().assert_existing_objects_matched()
    except (AssertionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise _create_mismatch_error(path, str(error), allow_partial) from error
    except (tf.errors.OpError, IndexError) as error:
        dtypes = _OTHER_DTYPE.findall(str(error))
        if rows := [
            (parse_attribute_path(key), f"{saved} saved, {here} here", None, None)
            for key, here, saved in dtypes
        ]:
            raise _create_mismatch_error(path, format_differences(rows), True) from error
        raise create_read_error(path, error) from error


def _create_mismatch_error(path: str, text: str, allow_partial: bool) -> UsageError:
    record = os.path.join(os.path.dirname(path), "params.yaml")
    config = f" ({record})" if os.path.exists(record) else ""
    otherwise = ", or allow_partial_restore, which restores what fits"
    if allow_partial:
        otherwise = " (a model of this kind cannot be restored in part)"
    return UsageError(
        f"{path} does not fit this run; use the code and the config that it was saved with{config},"
        f" another model_dir{otherwise}:\n{text}"
    )


def _assert_consumed(status: Any, target: tf.train.Checkpoint, graph: CheckpointGraph) -> None:
    try:
        status.assert_consumed()
    except AssertionError:
        # Else TensorFlow lists, later and at length, what our own message says
        status.expect_partial()
        missing = find_missing_objects(graph, target)
        if not missing or len(_select_optimizer_paths(missing)) < len(missing):
            raise
        status.assert_existing_objects_matched()


def find_uncreated_variables(
    checkpoint: tf.train.Checkpoint, path: str, optional_sections: Collection[str] = ()
) -> list[str]:
    """Returns the paths of saved variables that optimizers inside the model have not created yet; runs eagerly.

    A tf_keras optimizer creates its slots in the first step, and TensorFlow restores each as it is
    created. So `restore` allows them to be missing, and `check_variables_created` checks afterwards
    that they were created.

    Args:
      checkpoint: The result of training_checkpoint.
      path: The prefix of the files that it was restored from.
      optional_sections: See `restore`.

    Raises:
      StorageError: when the files are gone or damaged.
    """
    judged = tf.train.Checkpoint(
        **{name: item for name, item in _items(checkpoint).items() if name not in optional_sections}
    )
    return sorted(_select_optimizer_paths(find_missing_objects(CheckpointGraph(path), judged)))


def check_variables_created(
    checkpoint: tf.train.Checkpoint, path: str, optional_sections: Collection[str] = ()
) -> None:
    """Raises for paths that `find_uncreated_variables` still returns after the step was traced.

    It takes the same arguments and runs eagerly.

    Raises:
      UsageError: when optimizers inside the model lack saved variables.
      StorageError: when the files are gone or damaged.
    """
    rows: list[tuple[str, str, Any, Any]]
    if rows := [
        (name, "not in this run", None, None)
        for name in find_uncreated_variables(checkpoint, path, optional_sections)
    ]:
        raise _create_mismatch_error(path, format_differences(rows), allow_partial=True)


def _select_optimizer_paths(missing: Mapping[str, Any]) -> list[str]:
    return [path for path, owner in missing.items() if hasattr(owner, "apply_gradients")]


def _describe_differences(
    checkpoint: tf.train.Checkpoint,
    saved: Mapping[str, tuple[int, ...]],
    strict: bool,
    optional_sections: Collection[str],
    max_rows: int | None,
) -> str:
    """Returns a table, by layer, of the differences between a file and this run; "" without any.

    The table has at most `max_rows` rows; None means all.

    Models and optimizers of tf_keras, and tf.Module, are saved by structure, not by name, and are
    not compared.
    """
    saved = {
        name: shape for name, shape in saved.items() if name.split("/")[0] not in optional_sections
    }
    items = {
        name: item
        for name, item in _without_absent(checkpoint, saved, strict).items()
        if name not in optional_sections
    }
    wanted = collect_variable_shapes(items)
    rows: list[tuple[str, str, Any, Any]] = []
    rows += [
        (name, "missing in the checkpoint", None, wanted[name])
        for name in wanted.keys() - saved.keys()
    ]
    if strict:
        by_structure = tuple(_saved_by_structure(items))
        others = {
            name for name in saved.keys() - wanted.keys() if not name.startswith(by_structure)
        }
        rows += [(name, "not in this run", saved[name], None) for name in others]
    both = wanted.keys() & saved.keys()
    rows += [
        (name, "another shape", saved[name], wanted[name])
        for name in both
        if saved[name] != wanted[name]
    ]
    return format_differences(sorted(rows, key=lambda row: row[0].rpartition("/")), max_rows)


def _saved_by_structure(items: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yields the paths of what is saved by structure, such as each of several optimizers of tf_keras, with a "/"."""
    for name, item in items.items():
        if isinstance(item, Mapping):
            yield from _saved_by_structure(item, f"{path}{name}/")
        elif not isinstance(item, tf.Variable):
            yield f"{path}{name}/"


def format_differences(
    rows: Sequence[tuple[str, str, Any, Any]], max_rows: int | None = ROWS
) -> str:
    """Formats rows of (name, what, shape saved, shape here) under a line for each layer.

    At most `max_rows` of them are shown; None means all.
    """
    lines: list[str] = []
    layer = None
    for name, what, saved, here in rows[:max_rows]:
        parent, _, leaf = name.rpartition("/")
        if parent != layer:
            lines += [f"  {parent or name}"]
            layer = parent
        shapes = [
            f"{list(shape)} {where}"
            for shape, where in ((saved, "saved"), (here, "here"))
            if shape is not None
        ]
        lines += [f"    {leaf:24} {what:26} {', '.join(shapes)}"]
    left = 0 if max_rows is None else len(rows) - max_rows
    return "\n".join(lines + ([f"  ... and {left} more"] if left > 0 else []))


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
    checkpoint: tf.train.Checkpoint, saved: Mapping[str, Any], strict: bool
) -> dict[str, Any]:
    """Returns the items of `checkpoint` without optional ones that the file does not hold."""
    sections = _sections(saved)
    optional = (
        OMITTABLE_SECTIONS if strict else (*OMITTABLE_SECTIONS, "optimizer")
    )  # which a best checkpoint lacks
    return {
        name: item
        for name, item in _items(checkpoint).items()
        if name in sections or name not in optional
    }


def _select_matching_items(
    checkpoint: tf.train.Checkpoint, saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the items of `checkpoint` without named variables that are missing or have another shape in the file."""

    def fitting(name: str, item: Any) -> Any:
        if isinstance(item, Mapping):
            return {
                key: kept
                for key, value in item.items()
                if (kept := fitting(f"{name}/{key}", value)) is not None
            }
        if isinstance(item, tf.Variable):
            return item if saved.get(name) == tuple(item.shape) else None
        return item

    items = {name: fitting(name, item) for name, item in _items(checkpoint).items()}
    return {name: item for name, item in items.items() if item is not None}


def collect_variable_shapes(items: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns a dict from name to shape of the variables that a checkpoint of named variables would save."""
    shapes: dict[str, tuple[int, ...]] = {}

    def collect(name: str, child: Any) -> None:
        if isinstance(child, tf.Variable):
            shapes[name] = tuple(child.shape)
        elif isinstance(child, Mapping):
            for key, value in child.items():
                collect(f"{name}/{key}", value)

    for section, child in items.items():
        collect(section, child)
    return shapes
