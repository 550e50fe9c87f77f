"""What a checkpoint holds, and its strict restore.

The root keys are TF Model Garden's: global_step, model, optimizer. Beside them stand the moving average of the weights,
if there is one, and what the model itself adds by `checkpoint_items`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.variables import canonical_paths, model_variables, optimizer_variables
from trainer_kit.errors import StorageError, UsageError

_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_BOOKKEEPING = ("save_counter", "_CHECKPOINTABLE_OBJECT_GRAPH")


def training_checkpoint(
    *, global_step: tf.Variable, model: Any, optimizer: Any = None, average: Mapping[str, tf.Variable] | None = None
) -> tf.train.Checkpoint:
    """Returns the checkpoint of a run. Eager, in strategy scope, after the optimizer was built.

    Args:
      global_step: int64 scalar.
      model: Keras 3, tf_keras or tf.Module; its `checkpoint_items`, a dict of trackables, is saved beside it.
      optimizer: a Keras 3 optimizer or a dict of them; None leaves it out, for evaluation.
      average: the moving average of the weights, by the paths of the variables; None leaves it out.
    """
    items: dict[str, Any] = {"global_step": global_step, "model": model_variables(model)}
    if optimizer is not None:
        items["optimizer"] = optimizer_variables(optimizer, model)
    if average is not None:
        items["average"] = dict(zip(canonical_paths(list(average)), average.values(), strict=True))
    items.update(getattr(model, "checkpoint_items", None) or {})
    return tf.train.Checkpoint(**items)


def weights_checkpoint(*, global_step: tf.Variable, model: Any) -> tf.train.Checkpoint:
    """Returns the checkpoint of the weights alone, as the best checkpoint keeps them."""
    return training_checkpoint(global_step=global_step, model=model)


def restore(checkpoint: tf.train.Checkpoint, path: str, *, whole: bool) -> None:
    """Restores `checkpoint` from `path`, strictly. Eager, in strategy scope.

    Args:
      checkpoint: of training_checkpoint.
      path: prefix of the files, `model_dir/ckpt-<step>`.
      whole: also refuse what the file has and the run has no place for; False for evaluation.

    Raises:
      UsageError: when a variable is missing, has another shape or, if `whole`, has no place; all are listed.
      StorageError: when the files are missing or damaged.
    """
    try:
        target = _without_average(checkpoint, path)
        if whole:
            _assert_consumed(target.restore(path))
        else:  # `read` does not ask for the counter of saves, which the best checkpoint does not hold
            target.read(path).expect_partial().assert_existing_objects_matched()
    except (AssertionError, ValueError) as error:
        raise UsageError(_mismatch(checkpoint, path, whole) or f"{path} does not fit this model: {error}") from error
    except tf.errors.NotFoundError as error:
        raise StorageError(f"{path} is gone or incomplete: {error.message}") from error
    except (tf.errors.OpError, IndexError) as error:
        raise StorageError(f"{path} is damaged and cannot be read: {error}") from error


def _assert_consumed(status: Any) -> None:
    try:
        status.assert_consumed()
    except AssertionError:
        status.expect_partial()  # else TensorFlow lists, later and at length, what our own message says
        raise


def saved_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of what the checkpoint at `path` holds, without TensorFlow's bookkeeping.

    Raises:
      StorageError: when there is no such checkpoint any more, or it cannot be read.
    """
    try:
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (tf.errors.NotFoundError, ValueError) as error:
        raise StorageError(f"{path} is gone or incomplete: {error}") from error
    except (tf.errors.OpError, IndexError) as error:
        raise StorageError(f"{path} is damaged and cannot be read: {error}") from error
    return {
        _readable(key): tuple(shape)
        for key, shape in shapes.items()
        if key.endswith(_SUFFIX) and not key.startswith(_BOOKKEEPING)
    }


def holds_average(path: str) -> bool:
    """Whether the checkpoint at `path` holds a moving average of the weights; the best checkpoint does not."""
    return any(name.startswith("average/") for name in saved_shapes(path))


def _without_average(checkpoint: tf.train.Checkpoint, path: str) -> tf.train.Checkpoint:
    if not hasattr(checkpoint, "average") or holds_average(path):
        return checkpoint
    return tf.train.Checkpoint(
        **{k: v for k, v in vars(checkpoint).items() if not k.startswith("_") and k != "average"}
    )


def _mismatch(checkpoint: tf.train.Checkpoint, path: str, whole: bool) -> str:
    """Lists by section what is missing, unexpected or of another shape; empty if names do not tell."""
    wanted = _wanted_shapes(checkpoint)
    saved = saved_shapes(path)
    missing = sorted(wanted.keys() - saved.keys())
    unexpected = sorted(saved.keys() - wanted.keys()) if whole else []
    reshaped = sorted(name for name in wanted.keys() & saved.keys() if wanted[name] != saved[name])
    lines = [f"  missing in the checkpoint: {name} {list(wanted[name])}" for name in missing]
    lines += [f"  not in this run: {name} {list(saved[name])}" for name in unexpected]
    lines += [f"  {name}: {list(saved[name])} saved, {list(wanted[name])} here" for name in reshaped]
    if not lines:
        return ""
    shown = lines[:12] + ([f"  ... and {len(lines) - 12} more"] if len(lines) > 12 else [])
    head = f"{path} does not fit this run; use the config it was made with, or another model_dir:"
    return "\n".join([head, *shown])


def _wanted_shapes(checkpoint: tf.train.Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the variables that a checkpoint of named variables would save."""
    shapes: dict[str, tuple[int, ...]] = {}

    def collect(name: str, child: Any) -> None:
        if isinstance(child, tf.Variable):
            shapes[name] = tuple(child.shape)
        elif isinstance(child, Mapping):
            for key, value in child.items():
                collect(f"{name}/{key}", value)

    for section, child in vars(checkpoint).items():
        if not section.startswith("_"):
            collect(section, child)
    return shapes


def _readable(key: str) -> str:
    return key.removesuffix(_SUFFIX).replace(".S", "/").replace("..", ".")
